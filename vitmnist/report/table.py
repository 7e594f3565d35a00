"""The values of a comparison as a table and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitmnist.config.labels import value_text
from vitmnist.report.compare import NOTHING, Comparison, Configuration, quality_text
from vitmnist.report.statistics import Spread, seconds
from vitmnist.runtime.records import csv_text
from vitmnist.tracking.epoch_table import epoch_metrics
from vitmnist.tracking.runs import TEST_ACC

Table = tuple[list[str], list[list[str]]]  # header, rows


def table(comparison: Comparison) -> Table:
    """A row for each configuration, in the order of the chart. Columns without a value are left out.

    So is the status if all runs completed.
    """
    measured = [_measured(comparison, row) for row in comparison.ordered]
    titles = [title for title in measured[0] if {values[title] for values in measured} - {NOTHING, "completed"}]
    rows = [
        [value_text(row.values.get(column, NOTHING)) for column in comparison.columns]
        + [values[title] for title in titles]
        for row, values in zip(comparison.ordered, measured, strict=True)
    ]
    return [*comparison.columns, *titles], rows


def _measured(comparison: Comparison, row: Configuration) -> dict[str, str]:
    """The measured values of a row by the title of their column: quality, time, and the rest."""
    monitored = comparison.metric
    quality, seeds = row.quality(monitored.name), NOTHING
    if quality and quality.n > 1:
        low, high = (quality_text(monitored, bound).rstrip("%") for bound in (quality.low, quality.high))
        seeds = f"{low}–{high}, n={quality.n}"
    cells = {
        monitored.column or monitored.name: _median(row.spread(monitored.name), monitored.digits),
        f"over {comparison.block}s": seeds,
        "test accuracy, %": _median(row.quality(TEST_ACC), 2),
    }
    for metric in epoch_metrics().values():
        if metric.column and metric != monitored:
            cells[metric.column] = _median(row.spread(metric.name), metric.digits)
        if metric.name == "epoch_s":
            cells["spread"] = str(row.epoch_s) if row.epoch_s and row.epoch_s.n > 1 else NOTHING
            cells["× fastest"] = str(comparison.to_fastest(row) or NOTHING)
    return cells | {"status": row.status}


def _median(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return NOTHING
    return seconds(spread.median) if digits is None else f"{spread.median:,.{digits}f}"


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """All rows of all comparisons, not rounded. An empty cell was not measured."""
    columns = dict.fromkeys(column for comparison in comparisons for column in comparison.columns)
    rows: list[dict[str, Any]] = [
        {"comparison": number, "machine": comparison.machine_and_data, **columns, **row.values}
        | _csv_values(comparison, row)
        for number, comparison in enumerate(comparisons, 1)
        for row in comparison.rows
    ]
    return csv_text(list(rows[0]), rows)


def _csv_values(comparison: Comparison, row: Configuration) -> dict[str, Any]:
    """Median, lowest and highest run of each metric, and how the time compares with the fastest."""
    values: dict[str, Any] = {"runs": len(row.runs), "runs_ranked": sum(map(len, row.rounds.values()))}
    ratio = comparison.to_fastest(row)
    values |= {
        "ratio_to_fastest": ratio and ratio.mean,
        "ratio_low": ratio and ratio.low,
        "ratio_high": ratio and ratio.high,
    }
    for metric in epoch_metrics().values():
        spread = row.spread(metric.name)
        for column, part in (("", "median"), ("_low", "low"), ("_high", "high")):
            values[f"{metric.name}{column}"] = getattr(spread, part, None)
    test = row.quality(TEST_ACC)
    return values | {TEST_ACC: test and test.median, "status": row.status}
