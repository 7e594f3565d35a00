"""Measures what limits a training loop, and how fast it is with other loaders.

For `vitmnist diagnose SCRIPT`, read `observer`, which times the loaders of the script, `observed_loader`, which stores
the times, and `script_report`, which prints them. For `vitmnist.diagnose`, read `measure`. Both use `candidates`.
"""
