"""How the report writes numbers and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitmnist.report.compare import Comparison, Configuration
from vitmnist.report.facts import NOTHING
from vitmnist.report.intervals import Interval, PairedRatio, Spread


def seconds(value: float | None) -> str:
    """Three significant digits, milliseconds at the finest."""
    if value is None:
        return NOTHING
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:.{3 - min(3, len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def value_text(value: Any) -> str:
    """A value of a configuration: a float with four digits, where it has more than eight."""
    return f"{value:.4g}" if isinstance(value, float) and len(str(value)) > 8 else str(value)


def row_name(comparison: Comparison, row: Configuration) -> str:
    """A row as one would type it."""
    return where(zip(comparison.columns, row.values, strict=True))


def where(values: Iterable[tuple[str, Any]]) -> str:
    """Keys and values as one would type them."""
    return " ".join(f"{key}={value_text(value)}" for key, value in values)


def listed(names: Sequence[str], separator: str = "; ") -> str:
    """At most four names; of more the first and the last, and how many are between."""
    if len(names) <= 4:
        return separator.join(names)
    return f"{names[0]}{separator}{names[-1]} (and {len(names) - 2} between: see the table)"


def coverage(share: float) -> str:
    """In percent; never 100."""
    return f"{min(100 * share, 99.9):.1f}%"


def spread_text(spread: Spread) -> str:
    """How sure a median is."""
    if spread.n == 1:
        return "single run"
    if sure := spread.confidence_interval:
        return f"{coverage(sure.coverage)} interval {seconds(sure.low)}–{seconds(sure.high)}, n={spread.n}"
    return f"range {seconds(spread.low)}–{seconds(spread.high)}, n={spread.n}"


def interval_text(interval: Interval) -> str:
    """The interval of a ratio, and its coverage."""
    return f"{interval.low:.2f}–{interval.high:.2f}, {coverage(interval.coverage)}"


def verdict(ratio: PairedRatio | None) -> str:
    """A ratio of times, and whether it is a difference."""
    if ratio is None:
        return NOTHING
    if ratio.interval is None:
        return f"{ratio.ratio:.2f}, {'single round' if ratio.rounds == 1 else 'not enough repeats'}"
    low, high = ratio.interval.low, ratio.interval.high
    return f"{ratio.ratio:.2f} ({low:.2f}–{high:.2f}){'' if ratio.is_difference else ', not distinguishable'}"
