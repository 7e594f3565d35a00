"""Measures what limits a training loop, and how fast it is with other loaders."""
