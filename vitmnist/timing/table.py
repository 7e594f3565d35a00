"""The table of a benchmark: a row for each candidate. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

NOTICEABLE_SHARE = 0.05
"""The smallest share of the time that is mentioned."""


@dataclass(frozen=True)
class Spread:
    """Median and range of `n` measured values, of blocks of batches or of runs."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise values, at least one."""
        values = list(values)
        return cls(median(values), min(values), max(values), len(values))

    def text(self, write: Callable[[float], str] = "{:.3g}".format) -> str:
        """`median (low–high)`; without the range if it is a single value."""
        return write(self.median) + ("" if self.low == self.high else f" ({write(self.low)}–{write(self.high)})")


@dataclass(frozen=True)
class Row:
    """A row of the table: times in seconds, medians over blocks. `error` says why a candidate could not be timed.

    Args:
        waiting_pct: of an epoch.
        set_up_s: before the first epoch.
        pays_from: the epoch in which the set-up has been saved, compared with the first row; None if never.
        change: the line that puts this candidate into a script.
    """

    name: str
    batch_s: Spread | None = None
    epoch_s: Spread | None = None
    waiting_pct: float | None = None
    set_up_s: float | None = None
    pays_from: int | None = None
    change: str | None = None
    error: str | None = None


def format_rows(rows: Sequence[Row]) -> str:
    """The table as text; a row that could not be timed says why."""
    width = max((len(row.name) for row in rows), default=0) + 2
    lines = [" " * width + "".join(f"{title:>11}" for title in ("waiting", "epoch", "set-up", "pays from"))]
    for row in rows:
        if row.error or not row.batch_s:
            lines.append(f"{row.name:<{width}}{row.error}")
            continue
        cells = (
            "" if row.waiting_pct is None else f"{row.waiting_pct:.0f}%",
            format_s(row.epoch_s.median) if row.epoch_s else f"{format_ms(row.batch_s.median)}*",
            "" if row.set_up_s is None else format_s(row.set_up_s),
            "" if row.pays_from is None else f"epoch {row.pays_from}",
        )
        lines.append(f"{row.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells).rstrip())
    if any(row.batch_s and not row.epoch_s for row in rows):
        lines.append("* a batch; the length of an epoch is not known")
    return "\n".join(lines)


COMPUTE_BOUND_PCT = 10.0  # Below this share of waiting, the step is the limit.
INPUT_BOUND_PCT = 60.0  # Above this share of waiting, the loader is the limit.
FEW_STEPS = 20  # With fewer steps there is no verdict.


class Bottleneck(str, Enum):
    """What limits a loop, or why that is not known."""

    INPUT = "input-bound"
    BALANCED = "balanced"
    COMPUTE = "compute-bound"
    TOO_FEW_STEPS = "no verdict"

    @classmethod
    def of(cls, waiting_pct: float, steps: int) -> Bottleneck:
        """The limit of a loop that spends this percentage of its time waiting for batches."""
        if steps < FEW_STEPS:
            return cls.TOO_FEW_STEPS
        if waiting_pct < COMPUTE_BOUND_PCT:
            return cls.COMPUTE
        return cls.INPUT if waiting_pct > INPUT_BOUND_PCT else cls.BALANCED


def format_bottleneck(bottleneck: Bottleneck, waiting_pct: float, steps: int) -> str:
    """One sentence, without a bound of the gain: the time of the step without loading is not known."""
    if bottleneck is Bottleneck.TOO_FEW_STEPS:
        return format_few_steps(steps)
    return f"{bottleneck.value}: {waiting_pct:.0f}% of the time is spent waiting for data"


def format_few_steps(steps: int) -> str:
    """The sentence in place of a verdict."""
    return f"no verdict: it needs {FEW_STEPS} steps, and only {steps} {'was' if steps == 1 else 'were'} measured"


def format_ms(seconds: float) -> str:
    """A time with the digits that matter: `0.02 ms`, `5.3 ms`, `1,207 ms`."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


def format_s(seconds: float) -> str:
    """A time with the digits that matter: `0.03 s`, `4.4 s`, `1,207 s`."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
