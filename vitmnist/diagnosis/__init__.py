"""Measures and checks data loaders of other programs."""
