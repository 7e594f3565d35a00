"""What limits a loop, in one sentence. Does not import torch."""

from __future__ import annotations

import math

COMPUTE_BOUND_PCT = 10.0  # of the time spent waiting, below which the step is the limit
INPUT_BOUND_PCT = 60.0  # and above which the loader is


def verdict(batch_s: float, waiting_s: float) -> str:
    """One sentence: what limits a loop, and how much faster it could be without waiting for data.

    Args:
        batch_s: seconds per batch, waiting included.
        waiting_s: seconds per batch spent waiting for data.
    """
    pct, step_s = 100 * waiting_s / batch_s, batch_s - waiting_s
    gain = batch_s / step_s if step_s > 0 else math.inf
    waiting = f"{pct:.0f}% of the time is spent waiting for data"
    if pct < COMPUTE_BOUND_PCT:
        return f"compute-bound: {waiting}; no loader can make it more than {gain:.2f} times faster"
    kind = "input-bound" if pct > INPUT_BOUND_PCT else "balanced"
    shorter = f"{milliseconds(step_s)} instead of {milliseconds(batch_s)}"
    return f"{kind}: {waiting}; without waiting a batch would take {shorter}, {gain:.3g} times faster"


def milliseconds(seconds: float) -> str:
    """A time with the digits that matter: `0.02 ms`, `5.3 ms`, `1,207 ms`."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


def plural(number: int, noun: str) -> str:
    """A number and its noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
