"""Measures what limits a training loop, and how fast it is with other loaders.

`vitmnist diagnose SCRIPT`: `observer` times the loaders of the script into `observed_loader`; `script_report` summarises
and prints that, after `candidates` has timed other loaders. `vitmnist.diagnose` is in `measure`, and uses `candidates` too.
"""
