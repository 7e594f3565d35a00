"""Draws the time per epoch of each configuration, its share of waiting, and how it compares with the fastest."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.report.compare import LOADER, NOTHING, Comparison, Configuration, value_text
from vitmnist.report.intervals import seconds
from vitmnist.report.table import to_fastest

# Okabe and Ito, Color Universal Design, 2008: distinguishable with any colour vision. A loader has the same colour in
# every chart.
COLOURS = {
    "disk": "#E69F00",
    "ram": "#0072B2",
    "cache": "#56B4E9",
    "gpu_slice": "#009E73",
    "prefetch": "#CC79A7",
    "auto": "#D55E00",
}
OTHER = "another loader"
WIDTH, BAR_HEIGHT = 11.0, 0.34  # inches
LABEL = 40  # characters


@rc_context({"text.parse_math": False})
def draw(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG with one chart for each comparison."""
    content = io.BytesIO()
    chart(comparisons).savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def chart(comparisons: Sequence[Comparison]) -> Figure:
    """A chart for each comparison that has times."""
    shown = []
    for comparison in comparisons:
        # By batch size; within a batch size the ranked rows first, then by time.
        timed = [(row.batch_size, not row.rounds, row.epoch_s.median, row) for row in comparison.rows if row.epoch_s]
        if timed:
            shown.append((comparison, [row for *_, row in sorted(timed, key=lambda entry: entry[:3])]))
    heights = [1.6 + BAR_HEIGHT * len(rows) for _, rows in shown]
    figure = Figure(figsize=(WIDTH, max(sum(heights), 2.0)), layout="constrained")
    FigureCanvasAgg(figure)
    if not shown:
        figure.text(0.5, 0.5, "no epoch has been measured yet", ha="center", va="center")
        return figure
    axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False).flat
    for axis, (comparison, rows) in zip(axes, shown, strict=True):
        _draw_comparison(axis, comparison, rows)
    return figure


def _draw_comparison(axis: Axes, comparison: Comparison, rows: list[Configuration]) -> None:
    names = [str(row.runs[0].config.get("data.loader.name")) for row in rows]
    names = [name if name in COLOURS else OTHER for name in names]
    colours = {**COLOURS, OTHER: "#999999"}
    widest = 0.0
    for y, (row, name) in enumerate(zip(rows, names, strict=True)):
        time, wait = row.epoch_s, row.spread("data_wait_s")
        assert time
        errors = [[time.median - time.low], [time.high - time.median]] if time.n > 1 else None
        axis.barh(y, time.median, color=colours[name], edgecolor="black", linewidth=0.6, xerr=errors, capsize=3)
        if wait:
            axis.barh(y, wait.median, color="white", alpha=0.75, hatch="////", edgecolor="black", linewidth=0.6)
        axis.text(time.high, y, f"  {_remark(comparison, row)}", fontsize=9, va="center")
        widest = max(widest, time.high)
    values = [[value_text(row.values.get(column, NOTHING)) for column in comparison.columns] for row in rows]
    labels = [f"{', '.join(texts) or 'all runs':.{LABEL}}" for texts in values]
    axis.set_yticks(range(len(rows)), labels, fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1.9 * widest)  # leaves room for the remarks
    axis.set_xlabel("seconds per epoch, evaluation included (median of runs; whiskers: range; × the fastest)")
    axis.set_ylabel(", ".join(comparison.columns))
    axis.set_title("\n".join(["Time per epoch", *textwrap.wrap(comparison.place, 90)]), fontsize=10, loc="left")
    axis.grid(True, axis="x", color="#dddddd")
    axis.set_axisbelow(True)
    used = {name: colour for name, colour in colours.items() if name in names}
    handles = [Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in used.items()]
    handles.append(Patch(facecolor="white", hatch="////", edgecolor="black", label="waiting for data"))
    axis.legend(handles=handles, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title=LOADER)


def _remark(comparison: Comparison, row: Configuration) -> str:
    assert row.epoch_s
    time = f"{seconds(row.epoch_s.median)} s (n={row.epoch_s.n})"
    if not row.rounds:
        return f"{time}, not ranked: {row.status:.60}"
    ratio = to_fastest(comparison, row)
    return f"{time}, × {ratio}" if ratio else time
