"""Draws a report: time per epoch of each configuration, its share of waiting, and how it compares with the fastest."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.report.compare import LOADER, Comparison, Configuration
from vitmnist.report.facts import place
from vitmnist.report.text import seconds, value_text, verdict

# Okabe and Ito, Color Universal Design, 2008: told apart with every kind of colour vision. A loader has one colour in
# every chart, whatever others are in it.
COLOURS = {
    "disk": "#E69F00",
    "ram": "#0072B2",
    "cache": "#56B4E9",
    "gpu_slice": "#009E73",
    "prefetch": "#CC79A7",
    "auto": "#D55E00",
}
OTHER = "#999999"
WIDTH, BAR_HEIGHT, LABEL = 11.0, 0.34, 40  # inches, inches, characters

Group = tuple[str, list[Configuration]]


@rc_context({"text.parse_math": False})
def draw(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG with one chart for each comparison."""
    content = io.BytesIO()
    chart(comparisons).savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def chart(comparisons: Sequence[Comparison]) -> Figure:
    """A chart for each comparison that has times: a bar for each row, the shortest first within a batch size."""
    shown = [comparison for comparison in comparisons if any(row.epoch_s for row in comparison.rows)]
    heights = [1.6 + BAR_HEIGHT * sum(1 + len(rows) for _, rows in groups_of(one)) for one in shown]
    figure = Figure(figsize=(WIDTH, max(sum(heights), 2.0)), layout="constrained")
    FigureCanvasAgg(figure)
    if not shown:
        figure.text(0.5, 0.5, "no epoch has been measured yet", ha="center", va="center")
        return figure
    axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False).flat
    for axis, comparison in zip(axes, shown, strict=True):
        _bars(axis, comparison)
    return figure


def groups_of(comparison: Comparison) -> list[Group]:
    """The rows that have a time, by batch size where that varies; within a group those that are ranked come first."""
    sizes = comparison.batch_sizes()
    groups: list[Group] = [
        (f"batch size {size:,}", [row for row in comparison.rows if comparison.value(row, "batch_size") == size])
        for size in sizes
    ] or [("", list(comparison.rows))]
    timed = [(title, [(row.epoch_s.median, row) for row in rows if row.epoch_s]) for title, rows in groups]
    return [
        (title, [row for _, row in sorted(rows, key=lambda pair: (not pair[1].ranked, pair[0]))])
        for title, rows in timed
        if rows
    ]


def _bars(axis: Axes, comparison: Comparison) -> None:
    y, ticks, widest = 0, {}, 0.0
    for title, rows in groups_of(comparison):
        if title:
            axis.text(0, y, title, fontsize=9, fontweight="bold", va="center")
            y += 1
        for row in rows:
            assert row.epoch_s
            time, colour = row.epoch_s, COLOURS.get(_loader(row), OTHER)
            wait = row.spread("data_wait_s")
            errors = [[time.median - time.low], [time.high - time.median]] if time.n > 1 else None
            axis.barh(y, time.median, color=colour, edgecolor="black", linewidth=0.6, xerr=errors, capsize=3)
            if wait:
                axis.barh(y, wait.median, color="white", alpha=0.75, hatch="////", edgecolor="black", linewidth=0.6)
            axis.text(time.high, y, f"  {_remark(comparison, rows[0], row)}", fontsize=9, va="center")
            ticks[y] = _label(comparison, row)
            widest = max(widest, time.high)
            y += 1
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axis.set_ylim(y - 0.4, -0.8)
    axis.set_xlim(0, 1.9 * widest)  # room for the remarks
    compared = "; × the fastest of its batch size" if comparison.batch_sizes() else "; × the fastest"
    axis.set_xlabel(f"seconds per epoch, training and evaluation (median of runs; whiskers: range{compared})")
    axis.set_ylabel(", ".join(column for column in comparison.columns if column != "batch_size") or "")
    axis.set_title("\n".join(["Time per epoch", *textwrap.wrap(place(comparison.facts), 90)]), fontsize=10, loc="left")
    axis.grid(True, axis="x", color="#dddddd")
    axis.set_axisbelow(True)
    _legend(axis, comparison)


def _loader(row: Configuration) -> str:
    """The registered name of a row's loader."""
    data = row.runs[0].config.get("data")
    loader = data.get("loader") if isinstance(data, dict) else None
    return str(loader.get("name")) if isinstance(loader, dict) else ""


def _legend(axis: Axes, comparison: Comparison) -> None:
    used = {_loader(row) for row in comparison.rows if row.epoch_s}
    shown = {name: colour for name, colour in COLOURS.items() if name in used}
    shown |= {"another loader": OTHER} if used - COLOURS.keys() else {}
    handles = [Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in shown.items()]
    handles.append(Patch(facecolor="white", hatch="////", edgecolor="black", label="waiting for data"))
    axis.legend(handles=handles, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title=LOADER)


def _label(comparison: Comparison, row: Configuration) -> str:
    values = zip(comparison.columns, row.values, strict=True)
    text = ", ".join(value_text(value) for column, value in values if column != "batch_size") or "all runs"
    return text if len(text) <= LABEL else f"{text[: LABEL // 2]}…{text[-LABEL // 2 :]}"


def _remark(comparison: Comparison, best: Configuration, row: Configuration) -> str:
    """Time, and how it compares with the fastest of its group."""
    assert row.epoch_s
    time = f"{seconds(row.epoch_s.median)} s (n={row.epoch_s.n})"
    if not row.ranked:
        return f"{time}, not ranked: {row.status.partition(':')[0].removeprefix('completed, ')}"
    return time if row is best else f"{time}, ×{verdict(comparison.ratio(row, best))}"
