"""The progress bar of tqdm: text in a terminal, a widget in a notebook."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # In a notebook without ipywidgets, tqdm warns, and shows text.
    from tqdm.auto import tqdm

__all__ = ["tqdm"]
