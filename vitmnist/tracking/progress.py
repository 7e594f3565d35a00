"""A progress bar that redraws twice a second at most, and not at all where nobody watches a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(label: str, steps: int, done: int = 0, shown: bool = True) -> Any:
    """A bar of `steps` batches; a context manager, whose `update` counts one."""
    return tqdm(
        total=steps,
        initial=done,
        desc=label,
        unit="batch",
        mininterval=0.5,
        leave=False,
        dynamic_ncols=True,
        disable=None if shown else True,
    )
