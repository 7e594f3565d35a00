"""Compares runs: which configuration is fastest, by how much, and how certain that is.

`grouping` divides runs by machine and data, `compare` and `statistics` compare configurations over rounds, `summary`,
`table` and `plots` present the result, and `write` writes the files. Nothing imports torch.
"""
