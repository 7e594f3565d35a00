"""Compares runs: which configuration is fastest, by how much, and how certain that is.

`grouping` divides runs by machine and data set, `compare` pairs the rounds of configurations, `summary`, `table` and
`plot` present the result, `page` makes the HTML page, and `write` writes the files. Nothing here imports torch.
"""
