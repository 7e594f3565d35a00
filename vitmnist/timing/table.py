"""The table of a benchmark: a row for each candidate. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

NOTICEABLE_SHARE = 0.05
"""Smaller shares of the time are not reported."""


@dataclass(frozen=True)
class Spread:
    """The median and the range of `n` measured values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        values = list(values)
        return cls(median(values), min(values), max(values), len(values))

    def text(self, write: Callable[[float], str] = "{:.3g}".format) -> str:
        """The text `median (low–high)`; without the range if all values are equal."""
        return write(self.median) + ("" if self.low == self.high else f" ({write(self.low)}–{write(self.high)})")


@dataclass(frozen=True)
class TimingRow:
    """A row of the table, with times in seconds; `error` says why a candidate could not be timed.

    Args:
        break_even_epoch: the epoch in which the set-up has paid off, compared with the first row; None if never.
        change: the line of code that puts this candidate into a script.
    """

    name: str
    batch_s: Spread | None = None
    epoch_s: Spread | None = None
    waiting_pct: float | None = None
    set_up_s: float | None = None
    break_even_epoch: int | None = None
    change: str | None = None
    error: str | None = None


def format_rows(rows: Sequence[TimingRow]) -> str:
    """Format the rows as a table; a row with an error has the error in place of figures."""
    width = max((len(row.name) for row in rows), default=0) + 2
    lines = [" " * width + "".join(f"{title:>11}" for title in ("waiting", "epoch", "set-up", "pays from"))]
    for row in rows:
        if row.error or not row.batch_s:
            lines.append(f"{row.name:<{width}}{row.error}")
            continue
        cells = (
            "" if row.waiting_pct is None else f"{row.waiting_pct:.0f}%",
            f"{format_seconds(row.epoch_s.median)} s" if row.epoch_s else f"{format_ms(row.batch_s.median)}*",
            "" if row.set_up_s is None else f"{format_seconds(row.set_up_s)} s",
            "" if row.break_even_epoch is None else f"epoch {row.break_even_epoch}",
        )
        lines.append(f"{row.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells).rstrip())
    if any(row.batch_s and not row.epoch_s for row in rows):
        lines.append("* a batch; the length of an epoch is not known")
    return "\n".join(lines)


COMPUTE_BOUND_PCT = 10.0
"""Below this percentage of waiting, the step limits the loop."""
INPUT_BOUND_PCT = 60.0
"""Above this percentage of waiting, the loader limits the loop."""
MIN_STEPS = 20
"""With fewer steps, there is no verdict."""
MIN_HOST_LEAD = 0.5
"""The lead of the host over the GPU, in steps, below which the GPU waits for Python."""


class Bottleneck(str, Enum):
    """What limits a training loop."""

    INPUT = "input-bound"
    BALANCED = "balanced"
    COMPUTE = "compute-bound"
    LAUNCH = "launch-bound"
    TOO_FEW_STEPS = "no verdict"

    @classmethod
    def of(cls, waiting_pct: float, steps: int, host_lead: float | None = None) -> Bottleneck:
        """What limits a loop that spends this percentage of its time waiting for batches.

        Args:
            host_lead: how many steps the host had queued on a GPU when the loop ended; None if that is not known.
        """
        if steps < MIN_STEPS:
            return cls.TOO_FEW_STEPS
        if waiting_pct < COMPUTE_BOUND_PCT:
            return cls.LAUNCH if host_lead is not None and host_lead < MIN_HOST_LEAD else cls.COMPUTE
        return cls.INPUT if waiting_pct > INPUT_BOUND_PCT else cls.BALANCED


def format_bottleneck(bottleneck: Bottleneck, waiting_pct: float, steps: int) -> str:
    """A sentence about the bottleneck, without a possible gain: the time of the step without loading is unknown."""
    if bottleneck is Bottleneck.TOO_FEW_STEPS:
        return f"no verdict: it needs {MIN_STEPS} steps, and only {steps} {'was' if steps == 1 else 'were'} measured"
    waiting = f"{waiting_pct:.0f}% of the time is spent waiting for data"
    if bottleneck is Bottleneck.LAUNCH:
        return f"{bottleneck.value}: the GPU waits for Python, and {waiting}"
    return f"{bottleneck.value}: {waiting}"


def format_ms(seconds: float) -> str:
    """Format a time as `0.02 ms`, `5.3 ms` or `1,207 ms`."""
    number = 1000 * seconds
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.1f} ms" if number >= 1 else f"{number:.2g} ms"


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits; from 100 s on, as a whole number."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}".rstrip(".")
