"""The figures of a comparison as rows: for people, for a spreadsheet, and in the articles' layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitmnist.report.compare import NOTHING, Cell, Comparison, Spread, as_text

Rows = list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A column of the table: its title, and what stands in it for a cell."""

    title: str
    text: Callable[[Cell], str]


def seconds(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return NOTHING
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:.{3 - min(3, len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def _middle(spread: Spread | None, digits: int = 1) -> str:
    return f"{spread.median:,.{digits}f}" if spread else NOTHING


def _range(spread: Spread | None) -> str:
    return f"{seconds(spread.low)}–{seconds(spread.high)}" if spread and spread.low < spread.high else NOTHING


def _mib(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def figures(comparison: Comparison) -> list[Figure]:
    """The columns that follow those of what was swept."""
    slowest = comparison.slowest

    def speedup(cell: Cell) -> str:
        comparable = slowest and not comparison.disturbed
        return f"{slowest / cell.epoch_s.median:.2f}" if slowest and comparable and cell.epoch_s else NOTHING

    target = comparison.target_acc

    def reached(cell: Cell) -> str:
        spread = cell.seconds_to(target) if target is not None else None
        return seconds(spread.median) if spread else NOTHING

    remarkable = any(cell.status != "completed" for cell in comparison.cells)
    return [
        *([Figure("runs", lambda cell: str(len(cell.runs)))] if comparison.repeated else []),
        *([Figure(f"to {target:g}%, s", reached)] if target is not None else []),
        Figure("epoch, s", lambda cell: seconds(cell.epoch_s.median) if cell.epoch_s else NOTHING),
        Figure("range", lambda cell: _range(cell.epoch_s)),
        Figure("waiting, s", lambda cell: seconds(cell.data_wait_s.median) if cell.data_wait_s else NOTHING),
        Figure("waiting, %", lambda cell: _middle(cell.data_wait_pct)),
        Figure("images/s", lambda cell: _middle(cell.images_per_s, 0)),
        Figure("accuracy, %", lambda cell: _middle(cell.val_acc, 2)),
        Figure("host, MiB", lambda cell: _mib(cell.host_peak_mib)),
        Figure("GPU, MiB", lambda cell: _mib(cell.gpu_peak_mib)),
        Figure("GPU busy, %", lambda cell: _middle(cell.gpu_util_pct, 0)),
        Figure("× slowest", speedup),
        *([Figure("status", lambda cell: cell.status)] if remarkable else []),
    ]


def table(comparison: Comparison) -> tuple[list[str], Rows]:
    """A row for each cell, in the order in which they were run; header and rows."""
    columns = figures(comparison)
    header = [*comparison.columns, *(column.title for column in columns)]
    return header, [
        [*map(as_text, cell.values), *(column.text(cell) for column in columns)] for cell in comparison.cells
    ]


def articles_table(comparison: Comparison) -> tuple[list[str], Rows]:
    """Seconds of an epoch, batch sizes down and loaders across, as in the articles; the best of a row is bold."""
    loaders = list(dict.fromkeys(comparison.value(cell, "data/loader") for cell in comparison.cells))
    by_place = {
        (comparison.value(cell, "batch_size"), comparison.value(cell, "data/loader")): cell for cell in comparison.cells
    }
    rows = []
    for size in comparison.batch_sizes():
        across = [by_place.get((size, loader)) for loader in loaders]
        best = min((cell.epoch_s.median for cell in across if cell and cell.epoch_s), default=None)
        row = [f"{size:,}"]
        for cell in across:
            if cell and cell.epoch_s:
                text = seconds(cell.epoch_s.median)
                row.append(f"**{text}**" if cell.epoch_s.median == best and len(loaders) > 1 else text)
            else:
                row.append(cell.runs[0].status if cell else NOTHING)
        rows.append(row)
    return ["batch size", *map(str, loaders)], rows


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """All cells of all comparisons with unrounded figures; seconds, percent and MiB. Empty: not measured."""
    columns = list(dict.fromkeys(column for comparison in comparisons for column in comparison.columns))
    spreads = ("epoch_s", "data_wait_s", "data_wait_pct", "compute_s", "images_per_s", "val_acc", "gpu_util_pct")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *("comparison", "machine", "data", *columns, "runs", "epochs_counted"),
            *(f"{name}{end}" for name in spreads for end in ("", "_low", "_high")),
            *("host_peak_mib", "gpu_peak_mib", "speedup", "status"),
        ]
    )
    for number, comparison in enumerate(comparisons, 1):
        machine = ", ".join(comparison.facts[key] for key in ("processor", "GPU") if key in comparison.facts)
        for cell in comparison.cells:
            values: list[Any] = [number, machine, comparison.facts.get("data")]
            values += [comparison.value(cell, name) if name in comparison.columns else None for name in columns]
            values += [len(cell.runs), len(cell.counted)]
            for name in spreads:
                spread: Spread | None = getattr(cell, name)
                values += [spread.median, spread.low, spread.high] if spread else [None] * 3
            slowest = comparison.slowest
            speedup = slowest / cell.epoch_s.median if slowest and cell.epoch_s else None
            writer.writerow([*values, cell.host_peak_mib, cell.gpu_peak_mib, speedup, cell.status])
    return text.getvalue()
