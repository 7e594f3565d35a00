"""Measures what limits a training loop, and how fast it would be with other loaders."""
