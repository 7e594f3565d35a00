"""Draws the chart of a report: the seconds per epoch of each configuration."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.config.schema import format_value
from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import COMPUTE_S, DATA_WAIT_S
from vitmnist.report.comparison import LOADER, Comparison, ReportRow
from vitmnist.timing.table import format_seconds


@rc_context({"text.parse_math": False})
def draw_chart(comparisons: Sequence[Comparison]) -> bytes | None:
    """Draw the times of all comparisons as a PNG image; None if there are none."""
    figure = draw_epoch_times(comparisons)
    if figure is None:
        return None
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    return png.getvalue()


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The colours of the loaders, in turn; distinguishable with any colour vision (Okabe and Ito, Color Universal Design,
2008)."""
GREY = "#777777"
PHASES: dict[str, dict[str, Any]] = {
    "waiting for data": {"fill": False, "hatch": "/////"},
    "computing": {},
    "other (evaluation, saving)": {"alpha": 0.35},
}
"""The parts of an epoch and their styles. The loader determines the colour."""
WIDTH, ROW_HEIGHT = 5.0, 0.47
"""The width of the figure and the height of a row, in inches."""
FONT_SIZE = 10
"""The size of all texts in points: about 10 pixels on a phone with a width of 360 pixels."""
MAX_ROWS = 100
"""The largest number of rows in a chart; a side of a PNG has at most 2**16 pixels."""
AXIS_LABEL = "seconds per epoch, evaluation included (whiskers: range)\n×: times the lowest median; ≈: may be noise"
LEGEND_STYLE: dict[str, Any] = {"handlelength": 1.4, "columnspacing": 1.2, "borderaxespad": 0.1}
"""The style of the legend; its three entries fit on one line."""
LABEL_LENGTH = 42
"""The number of characters that fit above a bar next to its time."""
LINE_LENGTH = 62
"""The number of characters that fit in the width of the figure."""


def draw_epoch_times(comparisons: Sequence[Comparison]) -> Figure | None:
    """Draw the times of each comparison that has any, one below the other, with one legend."""
    measured = [(comparison, [row for row in comparison.sorted_rows if row.epoch_s]) for comparison in comparisons]
    shown = [(comparison, rows[:MAX_ROWS]) for comparison, rows in measured if rows]
    if not shown:
        return None
    heights = [1.4 + ROW_HEIGHT * len(rows) for _, rows in shown]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    loaders = dict.fromkeys(row.values.get(LOADER) for comparison, _ in shown for row in comparison.rows)
    colours = {name: COLOURS[position % len(COLOURS)] for position, name in enumerate(loaders)}
    all_axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
    for axes, (comparison, rows) in zip(all_axes, shown, strict=True):
        _draw_times(axes, comparison, rows, colours)
    handles = [Patch(label=name, facecolor=GREY, edgecolor=GREY, **style) for name, style in PHASES.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, **LEGEND_STYLE)
    return figure


def _draw_times(axes: Axes, comparison: Comparison, rows: Sequence[ReportRow], colours: Mapping[Any, str]) -> None:
    text_style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": FONT_SIZE}
    for position, row in enumerate(rows):
        _draw_bar(axes, position, row, colours[row.values.get(LOADER)])
        # The title names the keys.
        values = [format_value(row.values[column]) for column in comparison.columns if column in row.values]
        label = escape_unprintable(", ".join(values)) or "all runs"
        label = label if len(label) <= LABEL_LENGTH else f"{label[: LABEL_LENGTH - 1]}…"
        axes.text(0, position - 0.25, label, ha="left", **text_style)
        axes.text(1, position - 0.25, _time_text(comparison, row), ha="right", **text_style)
    axes.set(xlim=(0, 1.01 * max(row.epoch_s.high for row in rows if row.epoch_s)))
    axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.8))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.set_xlabel(AXIS_LABEL, fontsize=FONT_SIZE, loc="left")
    title = f"Time per epoch by {', '.join(comparison.columns)}".removesuffix(" by ")
    lines: list[str] = []
    for text in (title, comparison.machine_and_data):
        lines += textwrap.wrap(escape_unprintable(text), LINE_LENGTH, max_lines=3, placeholder=" …")
    axes.set_title("\n".join(lines), fontsize=FONT_SIZE, loc="left")


def _draw_bar(axes: Axes, position: int, row: ReportRow, colour: str) -> None:
    time = row.epoch_s
    assert time
    start = 0.0
    for style, width in zip(PHASES.values(), _phases(row), strict=True):
        axes.barh(position, width, 0.42, left=start, facecolor=colour, edgecolor=colour, linewidth=0.6, **style)
        start += width
    if time.n > 1:
        whiskers = [[time.median - time.low], [time.high - time.median]]
        axes.errorbar(time.median, position, xerr=whiskers, color="black", linewidth=1, capsize=3)


def _time_text(comparison: Comparison, row: ReportRow) -> str:
    assert row.epoch_s
    seconds = f"{format_seconds(row.epoch_s.median)} s"
    if not row.rounds:
        return f"{seconds}, not compared"
    if row is comparison.timed_rows[0]:
        return f"{seconds}, 1×"
    ratio = comparison.ratio(row)
    return f"{seconds}, {'' if ratio.is_clear else '≈'}{ratio.mean:.2f}×" if ratio else seconds


def _phases(row: ReportRow) -> tuple[float, float, float]:
    """Return the seconds that an epoch waits, computes and does other work; they add up to its median time."""
    assert row.epoch_s
    epoch = row.epoch_s.median
    wait, compute = row.spreads[DATA_WAIT_S.name], row.spreads[COMPUTE_S.name]
    waiting = wait.median if wait else 0.0
    # The medians can come from different runs, so their sum could exceed the epoch.
    computing = min(compute.median if compute else 0.0, epoch - waiting)
    return waiting, computing, epoch - waiting - computing
