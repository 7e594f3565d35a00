"""Draws the chart of a report: the times per epoch of each comparison."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.config.schema import value_text
from vitmnist.errors import printable
from vitmnist.metrics.epoch_table import COMPUTE_S, DATA_WAIT_S
from vitmnist.report.comparison import LOADER, Comparison, Configuration
from vitmnist.report.statistics import format_seconds

# Okabe and Ito, Color Universal Design, 2008: distinguishable with any colour vision. Loaders take them in turn.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
PHASES: dict[str, dict[str, Any]] = {
    "waiting for data": {"fill": False, "hatch": "/////"},
    "computing": {},
    "other (evaluation, saving)": {"alpha": 0.35},
}
"""Styles of the parts of an epoch, all in the colour of the loader."""
WIDTH, ROW_HEIGHT, FONT = 5.0, 0.47, 10
"""Sizes in inches, and of the font in points: on a phone, 360 pixels wide, text has 10 pixels."""
MAX_ROWS = 100
"""A chart has the first rows of a table: a PNG has at most 2**16 pixels a side."""
AXIS = "seconds per epoch, evaluation included (whiskers: range)\n×: times the lowest median; ≈: may be noise"
NARROW: dict[str, Any] = {"handlelength": 1.4, "columnspacing": 1.2, "borderaxespad": 0.1}
"""The style of a legend whose three entries fit in a line."""
LABEL, LINE = 42, 62
"""Characters that fit above a bar next to its time, and in the width of the chart."""


@rc_context({"text.parse_math": False})
def draw(comparisons: Sequence[Comparison]) -> bytes:
    """The chart as PNG."""
    png = io.BytesIO()
    chart(comparisons).savefig(png, format="png", dpi=160, metadata={"Software": None})
    return png.getvalue()


def chart(comparisons: Sequence[Comparison]) -> Figure:
    """The times of each comparison that has any, one below the other, with one legend."""
    shown: list[tuple[Comparison, list[Configuration]]] = []
    for comparison in comparisons:
        rows = [row for row in comparison.ordered if row.epoch_s]
        if rows:
            shown.append((comparison, rows[:MAX_ROWS]))
    heights = [1.4 + ROW_HEIGHT * len(rows) for _, rows in shown]
    figure = Figure(figsize=(WIDTH, max(sum(heights) + 0.5, 2.0)), layout="constrained")
    if not shown:
        figure.text(0.02, 0.5, "no epoch has been measured yet", va="center")
        return figure
    loaders = dict.fromkeys(row.values.get(LOADER) for comparison, _ in shown for row in comparison.rows)
    colours = {name: COLOURS[position % len(COLOURS)] for position, name in enumerate(loaders)}
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
    for axis, (comparison, rows) in zip(axes, shown, strict=True):
        _draw_times(axis, comparison, rows, colours)
    grey = {"facecolor": "#777777", "edgecolor": "#777777"}
    handles = [Patch(label=name, **{**grey, **style}) for name, style in PHASES.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, **NARROW)
    return figure


def _draw_times(axis: Axes, comparison: Comparison, rows: Sequence[Configuration], colours: Mapping[Any, str]) -> None:
    """A bar for each row: its time per epoch, divided into phases; above it its values, and how its time compares."""
    position: dict[str, Any] = {"transform": axis.get_yaxis_transform(), "va": "bottom", "fontsize": FONT}
    for y, row in enumerate(rows):
        time, colour = row.epoch_s, colours[row.values.get(LOADER)]
        assert time
        start = 0.0
        for style, width in zip(PHASES.values(), _phases(row), strict=True):
            axis.barh(y, width, 0.42, left=start, facecolor=colour, edgecolor=colour, linewidth=0.6, **style)
            start += width
        if time.n > 1:
            errors = [[time.median - time.low], [time.high - time.median]]
            axis.errorbar(time.median, y, xerr=errors, color="black", linewidth=1, capsize=3)
        # The title names the keys.
        values = [value_text(row.values[column]) for column in comparison.columns if column in row.values]
        name = printable(", ".join(values)) or "all runs"
        axis.text(0, y - 0.25, name if len(name) <= LABEL else f"{name[: LABEL - 1]}…", ha="left", **position)
        axis.text(1, y - 0.25, _time_text(comparison, row), ha="right", **position)
    axis.set(xlim=(0, 1.01 * max(row.epoch_s.high for row in rows if row.epoch_s)))
    axis.set(yticks=[], ylim=(len(rows) - 0.6, -0.8))
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(labelsize=FONT)
    axis.set_xlabel(AXIS, fontsize=FONT, loc="left")
    titles = [f"Time per epoch by {', '.join(comparison.columns)}".removesuffix(" by "), comparison.machine_and_data]
    lines = [line for title in titles for line in textwrap.wrap(printable(title), LINE, max_lines=3, placeholder=" …")]
    axis.set_title("\n".join(lines), fontsize=FONT, loc="left")


def _time_text(comparison: Comparison, row: Configuration) -> str:
    """Seconds per epoch, and their ratio to the lowest median."""
    assert row.epoch_s
    seconds = f"{format_seconds(row.epoch_s.median)} s"
    if not row.rounds:
        return f"{seconds}, not ranked"
    if row is comparison.ranked[0]:
        return f"{seconds}, 1×"
    ratio = comparison.ratio(row)
    return f"{seconds}, {'' if ratio.is_clear else '≈'}{ratio.mean:.2f}×" if ratio else seconds


def _phases(row: Configuration) -> tuple[float, float, float]:
    """Seconds of an epoch spent waiting, computing and on the rest, which add up to its median time."""
    assert row.epoch_s
    epoch = row.epoch_s.median
    wait, compute = row.spreads[DATA_WAIT_S.name], row.spreads[COMPUTE_S.name]
    waiting = wait.median if wait else 0.0
    # The medians may come from different runs, so the two could exceed the epoch.
    computing = min(compute.median if compute else 0.0, epoch - waiting)
    return waiting, computing, epoch - waiting - computing
