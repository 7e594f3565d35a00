"""What limits a loop, in one sentence. Does not import torch."""

from __future__ import annotations

from vitmnist.runtime.cpu import Cores

COMPUTE_BOUND_PCT = 10.0  # of the time spent waiting, below which the step is the limit
INPUT_BOUND_PCT = 60.0  # and above which the loader is
FEW_STEPS = 20  # below which there is no verdict


def verdict(waiting_pct: float, steps: int, cores: Cores | None) -> str:
    """One sentence: what limits a loop; without a bound, because the time of the step without loading is not known.

    Args:
        waiting_pct: the percentage of the time spent waiting for data.
        steps: how many it was measured over.
        cores: in use meanwhile; None if unknown.
    """
    if steps < FEW_STEPS:
        return few(steps)
    waiting = f"{waiting_pct:.0f}% of the time is spent waiting for data"
    busy = f", with {cores}" if cores else ""
    if waiting_pct >= COMPUTE_BOUND_PCT:
        return f"{limit(waiting_pct)}: {waiting}{busy}"
    if may_loading_limit(waiting_pct, steps, cores):
        return f"{waiting}{busy}; whether loading slows down the step is not measured"
    return f"{limit(waiting_pct)}: {waiting}{busy}"


def may_loading_limit(waiting_pct: float, steps: int, cores: Cores | None) -> bool:
    """Whether another loader may make a loop faster: its verdict is not that the step alone is the limit."""
    return steps >= FEW_STEPS and (waiting_pct >= COMPUTE_BOUND_PCT or cores is None or cores.compete)


def limit(loading_pct: float) -> str:
    """What limits a loop that spends this percentage of its time on loading."""
    if loading_pct < COMPUTE_BOUND_PCT:
        return "compute-bound"
    return "input-bound" if loading_pct > INPUT_BOUND_PCT else "balanced"


def few(steps: int) -> str:
    """The sentence that replaces a verdict."""
    return f"no verdict: it needs {FEW_STEPS} steps, and only {steps} {'was' if steps == 1 else 'were'} measured"


def milliseconds(seconds: float) -> str:
    """A time with the digits that matter: `0.02 ms`, `5.3 ms`, `1,207 ms`."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


def plural(number: int, noun: str) -> str:
    """A number and its noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
