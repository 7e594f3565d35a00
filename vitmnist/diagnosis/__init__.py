"""Measures where the time of a training loop goes, and what would make it faster."""
