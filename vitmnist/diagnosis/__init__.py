"""Measures what limits a training loop, and how fast it is with other loaders.

For `vitmnist diagnose SCRIPT`, `observer` records times in `observed_loader`, and `script_report` prints them. For
`vitmnist.diagnose`, read `measure`. Both time other loaders by `candidates`.
"""
