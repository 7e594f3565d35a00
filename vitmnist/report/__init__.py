"""The answer of a sweep: which configuration is fast, by how much, and why.

`runs` reads what runs left behind, `compare` lines up those that may be compared, `table` and `picture` show them,
`write` leaves `report.md`, `report.html`, `report.csv` and `report.png`. Nothing here imports torch.
"""
