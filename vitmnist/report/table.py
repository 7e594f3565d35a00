"""The figures of a comparison as rows: for people, as CSV, and in the articles' layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from vitmnist.report.compare import LOADER, Comparison, Configuration
from vitmnist.report.facts import NOTHING
from vitmnist.report.intervals import Interval, PairedRatio, Spread
from vitmnist.report.text import coverage, seconds, value_text, verdict

Rows = list[list[str]]
SPREADS = ("epoch_s", "train_s", "data_wait_s", "data_wait_pct", "save_s", "compute_s", "images_per_s", "gpu_util_pct")
PEAKS = ("host_peak_mib", "gpu_peak_mib")


def table(comparison: Comparison) -> tuple[list[str], Rows]:
    """A row for each configuration, in the order in which they were run, without empty columns; header and rows."""
    columns = _figures(comparison)
    rows = [[text(row) for text in columns.values()] for row in comparison.rows]
    used = [place for place in range(len(columns)) if any(row[place] != NOTHING for row in rows)]
    header = [*comparison.columns, *(title for place, title in enumerate(columns) if place in used)]
    return header, [
        [*map(value_text, row.values), *(cells[place] for place in used)]
        for row, cells in zip(comparison.rows, rows, strict=True)
    ]


def _figures(comparison: Comparison) -> dict[str, Callable[[Configuration], str]]:
    """The columns after those of the configuration: title, and text for a row."""
    target = comparison.target_acc
    has_repeats = any(len(row.runs) > 1 for row in comparison.rows)
    is_remarkable = any(row.status != "completed" for row in comparison.rows)
    return {
        "runs": lambda row: str(len(row.runs)) if has_repeats else NOTHING,
        f"to {target or 0:g}%, s": lambda row: _median(row.seconds_to(target) if target is not None else None),
        "epoch, s": lambda row: _median(row.epoch_s),
        "range": lambda row: _range(row.epoch_s),
        "interval": _interval,
        "× fastest": lambda row: verdict(_to_best(comparison, row)),
        "training, s": lambda row: _median(row.spread("train_s")),
        "waiting, s": lambda row: _median(row.spread("data_wait_s")),
        "waiting, %": lambda row: _median(row.spread("data_wait_pct"), 1),
        "saving, s": lambda row: _median(row.spread("save_s")),
        "images/s": lambda row: _median(row.spread("images_per_s"), 0),
        "accuracy, %": lambda row: _median(row.accuracy, 2),
        "host, MiB": lambda row: _number(row.peak("host_peak_mib"), 0),
        "GPU, MiB": lambda row: _number(row.peak("gpu_peak_mib"), 0),
        "GPU busy, %": lambda row: _median(row.spread("gpu_util_pct"), 0),
        "status": lambda row: row.status if is_remarkable else NOTHING,
    }


def _number(value: float | None, digits: int | None = None) -> str:
    """With so many digits after the point; None: as seconds."""
    return seconds(value) if digits is None or value is None else f"{value:,.{digits}f}"


def _median(spread: Spread | None, digits: int | None = None) -> str:
    return _number(spread.median if spread else None, digits)


def _range(spread: Spread | None) -> str:
    return f"{seconds(spread.low)}–{seconds(spread.high)}" if spread and spread.n > 1 else NOTHING


def _interval(row: Configuration) -> str:
    found = row.epoch_s.confidence_interval if row.epoch_s and row.ranked else None
    return f"{seconds(found.low)}–{seconds(found.high)} ({coverage(found.coverage)})" if found else NOTHING


def _to_best(comparison: Comparison, row: Configuration) -> PairedRatio | None:
    """The ratio of a row's epoch time to the lowest."""
    ranked = comparison.ranked
    return comparison.ratio(row, ranked[0]) if row in ranked[1:] else None


def articles_table(comparison: Comparison) -> tuple[list[str], Rows]:
    """Seconds per epoch, batch sizes down and loaders across, as in the articles; the lowest of a row is bold.

    Empty where something else than loader and batch size varies.
    """
    sizes = comparison.batch_sizes()
    if set(comparison.columns) != {LOADER, "batch_size"} or not sizes:
        return [], []
    loaders = list(dict.fromkeys(comparison.value(row, LOADER) for row in comparison.rows if row.runs[0].config))
    places = {(comparison.value(row, "batch_size"), comparison.value(row, LOADER)): row for row in comparison.rows}
    lines = []
    for size in sizes:
        across = [places.get((size, loader)) for loader in loaders]
        lowest = min((row.epoch_s.median for row in across if row and row.ranked and row.epoch_s), default=None)
        cells = []
        for row in across:
            if row and row.ranked and row.epoch_s:
                text = seconds(row.epoch_s.median)
                cells.append(f"**{text}**" if row.epoch_s.median == lowest and len(loaders) > 1 else text)
            else:  # a time that is not compared does not stand next to those that are
                cells.append(row.status.partition(":")[0] if row else NOTHING)
        lines.append([f"{size:,}", *cells])
    return ["batch size", *map(str, loaders)], lines


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """All rows of all comparisons with unrounded figures; seconds, percent and MiB. Empty: not measured."""
    columns = list(dict.fromkeys(column for comparison in comparisons for column in comparison.columns))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *("comparison", "machine", "data", *columns, "runs", "runs_ranked"),
            *(f"{name}{end}" for name in (*SPREADS, "eval_acc") for end in ("", "_low", "_high")),
            *("epoch_s_interval_low", "epoch_s_interval_high", "epoch_s_interval_coverage"),
            *("ratio_to_fastest", "ratio_low", "ratio_high", "ratio_coverage", *PEAKS, "status"),
        ]
    )
    for number, comparison in enumerate(comparisons, 1):
        machine = ", ".join(comparison.facts[key] for key in ("host", "processor", "GPU") if key in comparison.facts)
        for row in comparison.rows:
            values: list[Any] = [number, machine, comparison.facts.get("data")]
            values += [comparison.value(row, column) for column in columns]
            values += [len(row.runs), sum(map(len, row.ranked.values()))]
            for spread in (*map(row.spread, SPREADS), row.accuracy):
                values += [spread.median, spread.low, spread.high] if spread else [None] * 3
            ratio = _to_best(comparison, row)
            values += _ends(row.epoch_s.confidence_interval if row.epoch_s and row.ranked else None)
            values += [ratio.ratio if ratio else None, *_ends(ratio.interval if ratio else None)]
            writer.writerow([*values, *map(row.peak, PEAKS), row.status])
    return text.getvalue()


def _ends(interval: Interval | None) -> list[float | None]:
    return [interval.low, interval.high, interval.coverage] if interval else [None] * 3
