"""Compares runs: which configuration is fastest, by how much, and how sure that is.

`runs` reads the records, `compare` groups the runs that may be compared, `summary`, `table` and `plot` present them,
and `write` writes `report.md`, `report.html`, `report.csv` and `report.png`. Nothing here imports torch.
"""
