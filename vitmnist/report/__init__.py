"""Compares runs: which configuration is best, by how much, and how certain that is. No module imports torch."""
