"""Compares runs: which configuration is fastest, by how much, and how certain that is. Nothing imports torch."""
