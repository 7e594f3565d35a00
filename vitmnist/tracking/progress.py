"""A progress bar for a pass over a split."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(label: str, steps: int, done: int = 0, shown: bool = True) -> Any:
    """A context manager whose `update` counts one batch; draws at most twice a second, and only on a terminal."""
    return tqdm(
        total=steps,
        initial=done,
        desc=label,
        unit="batch",
        mininterval=0.5,
        leave=False,
        dynamic_ncols=True,
        disable=None if shown else True,  # None: only if stderr is a terminal
    )
