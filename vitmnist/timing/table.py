"""The table of a benchmark: times of a candidate, the row that is computed from them, and the printed columns.

A new column needs a field of `LoaderTiming`, its value in `with_estimates`, and its cell in `COLUMNS`. If the table of
`auto` has it too, docs/records.md describes the field. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, floor, log10
from statistics import median

NOTICEABLE_SHARE = 0.05
"""Smaller shares of the time are not reported."""
COMPUTE_BOUND_PCT = 10.0
"""Below this percentage of waiting, the step limits the loop."""
INPUT_BOUND_PCT = 60.0
"""Above this percentage of waiting, the loader limits the loop."""
MIN_STEPS = 20
"""With fewer steps, there is no verdict."""
MIN_HOST_LEAD = 0.5
"""If the host is less than this many steps ahead of the GPU, the GPU waits for Python."""


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

    def format_times(self) -> str:
        """Format times in seconds as `median (low–high)`."""
        return f"{format_ms(self.median)} ({format_ms(self.low)}–{format_ms(self.high)})"


@dataclass(frozen=True)
class TimedWindow:
    """The times of the first batches of an epoch, in seconds."""

    batches: int  # Including those that are neither the first nor timed
    first_s: float  # Until the end of the first step
    first_waiting_s: float
    later_batch_s: float  # The mean of the later batches, each with its step
    later_waiting_s: float
    host_lead: float | None = None  # The number of steps that were queued on a GPU at the end; None on the CPU


@dataclass(frozen=True)
class LoaderTiming:
    """A row of the table. Times are in seconds.

    Args:
        waiting_pct: percentage of an epoch that the step waits; None if loading was timed without a step.
        break_even_epoch: the epoch in which the set-up pays off, compared with the first row; None if it never does.
        change: line of code that puts this candidate into a script.
        error: why the candidate could not be timed. It takes the place of the figures.
    """

    name: str
    batch_s: Spread | None = None
    epoch_s: Spread | None = None
    waiting_pct: float | None = None
    setup_s: float | None = None
    break_even_epoch: int | None = None
    change: str | None = None
    error: str | None = None

    def with_estimates(
        self, windows: Sequence[TimedWindow], length: float, has_step: bool, baseline: LoaderTiming | None
    ) -> LoaderTiming:
        """Add the figures for epochs of `length` batches. `baseline` is the row of the loader in use."""
        epochs_s = [window.first_s + window.later_batch_s * (length - 1) for window in windows]
        waiting_s = [window.first_waiting_s + window.later_waiting_s * (length - 1) for window in windows]
        waiting_pct = median(100 * part / (whole or 1.0) for part, whole in zip(waiting_s, epochs_s, strict=True))
        saved_s = baseline.epoch_s.median - median(epochs_s) if baseline and baseline.epoch_s else 0.0
        return replace(
            self,
            batch_s=Spread.of(window.later_batch_s for window in windows),
            epoch_s=Spread.of(epochs_s),
            waiting_pct=waiting_pct if has_step else None,
            break_even_epoch=max(1, ceil((self.setup_s or 0.0) / saved_s)) if saved_s > 0 else None,
        )


COLUMNS: dict[str, Callable[[LoaderTiming], str]] = {
    "waiting": lambda timing: "" if timing.waiting_pct is None else f"{timing.waiting_pct:.0f}%",
    "epoch": lambda timing: "" if timing.epoch_s is None else f"{format_seconds(timing.epoch_s.median)} s",
    "set-up": lambda timing: "" if timing.setup_s is None else f"{format_seconds(timing.setup_s)} s",
    "pays from": lambda timing: "" if timing.break_even_epoch is None else f"epoch {timing.break_even_epoch}",
}
"""The title of each column, and its cell for a row."""


def format_timings(timings: Sequence[LoaderTiming]) -> str:
    width = max((len(timing.name) for timing in timings), default=0) + 2
    lines = [" " * width + "".join(f"{title:>11}" for title in COLUMNS)]
    for timing in timings:
        cells = "".join(f"{format_cell(timing):>11}" for format_cell in COLUMNS.values())
        lines.append(f"{timing.name:<{width}}" + (timing.error or cells.rstrip()))
    return "\n".join(lines)


class Bottleneck(str, Enum):
    """What limits a training loop."""

    INPUT = "input-bound"
    BALANCED = "balanced"
    COMPUTE = "compute-bound"
    LAUNCH = "launch-bound"
    TOO_FEW_STEPS = "no verdict"

    @classmethod
    def of(cls, waiting_pct: float, steps: int, host_lead: float | None = None) -> Bottleneck:
        """Return what limits a loop that spends this percentage of its time waiting for batches.

        Args:
            host_lead: number of steps that were queued on a GPU when the loop ended; None if it is unknown.
        """
        if steps < MIN_STEPS:
            return cls.TOO_FEW_STEPS
        if waiting_pct < COMPUTE_BOUND_PCT:
            return cls.LAUNCH if host_lead is not None and host_lead < MIN_HOST_LEAD else cls.COMPUTE
        return cls.INPUT if waiting_pct > INPUT_BOUND_PCT else cls.BALANCED


def format_bottleneck(bottleneck: Bottleneck, waiting_pct: float, steps: int) -> str:
    """Name the bottleneck in a sentence. It predicts no speed-up, because the time of the step alone is unknown."""
    if bottleneck is Bottleneck.TOO_FEW_STEPS:
        return f"no verdict: it needs {MIN_STEPS} steps, and only {steps} {'was' if steps == 1 else 'were'} measured"
    waiting = f"{waiting_pct:.0f}% of the time is spent waiting for data"
    if bottleneck is Bottleneck.LAUNCH:
        return f"{bottleneck.value}: the GPU waits for Python, and {waiting}"
    return f"{bottleneck.value}: {waiting}"


def format_ms(seconds: float) -> str:
    """Format a time as `0.02 ms`, `5.3 ms` or `1,207 ms`."""
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2g} ms"


def round_seconds(seconds: float) -> float:
    """Round seconds to three significant digits; from 100 s on, to an integer."""
    return round(seconds, max(0, 2 - floor(log10(seconds))))


def format_seconds(seconds: float) -> str:
    """Format seconds as `round_seconds` rounds them."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}".rstrip(".")
