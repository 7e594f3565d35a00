"""Draws the time per epoch of each configuration, divided into its phases, and how it compares with the fastest."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.report.compare import NOTHING, Comparison, Configuration, value_text
from vitmnist.report.intervals import seconds
from vitmnist.report.table import to_fastest

OTHER = "another loader"
# Okabe and Ito, Color Universal Design, 2008: distinguishable with any colour vision. A loader has the same colour in
# every chart.
COLOURS = {
    "disk": "#E69F00",
    "ram": "#0072B2",
    "cache": "#56B4E9",
    "gpu_slice": "#009E73",
    "prefetch": "#CC79A7",
    "auto": "#D55E00",
    OTHER: "#999999",
}
PHASES: dict[str, dict[str, Any]] = {
    "waiting for data": {"fill": False, "hatch": "/////"},
    "computing": {},
    "other (evaluation, saving)": {"alpha": 0.35},
}
"""How the parts of an epoch are drawn, all in the colour of the loader: the page also has a dark background."""
WIDTH, BAR_HEIGHT = 9.0, 0.34  # inches
LABEL, TITLE = 26, 80  # characters in a line


@rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "vitmnist"})
def draw(comparisons: Sequence[Comparison]) -> tuple[bytes, str]:
    """One chart for each comparison, as PNG and as an SVG element with a transparent background."""
    figure, png, svg = chart(comparisons), io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=130, metadata={"Software": None})
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=no_metadata)
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]


def chart(comparisons: Sequence[Comparison]) -> Figure:
    """A chart for each comparison that has times."""
    shown = []
    for comparison in comparisons:
        # By batch size; within a batch size the ranked rows first, then by time.
        timed = [(row.batch_size, not row.rounds, row.epoch_s.median, row) for row in comparison.rows if row.epoch_s]
        if timed:
            shown.append((comparison, [row for *_, row in sorted(timed, key=lambda entry: entry[:3])]))
    heights = [1.6 + BAR_HEIGHT * len(rows) for _, rows in shown]
    figure = Figure(figsize=(WIDTH, max(sum(heights) + 0.5, 2.0)), layout="constrained")
    FigureCanvasAgg(figure)
    if not shown:
        figure.text(0.02, 0.5, "no epoch has been measured yet", va="center")
        return figure
    axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False).flat
    for axis, (comparison, rows) in zip(axes, shown, strict=True):
        _draw_comparison(axis, comparison, rows)
    used = {_loader(row) for _, rows in shown for row in rows}
    handles = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items() if name in used]
    handles += [Patch(facecolor="#777777", edgecolor="#777777", label=name, **style) for name, style in PHASES.items()]
    figure.legend(handles=handles, fontsize=9, loc="outside upper left", ncols=5, frameon=False)
    return figure


def _draw_comparison(axis: Axes, comparison: Comparison, rows: list[Configuration]) -> None:
    for y, row in enumerate(rows):
        time, colour, start = row.epoch_s, COLOURS[_loader(row)], 0.0
        assert time
        for style, width in zip(PHASES.values(), _phases(row), strict=True):
            axis.barh(y, width, left=start, facecolor=colour, edgecolor=colour, linewidth=0.6, **style)
            start += width
        if time.n > 1:
            errors = [[time.median - time.low], [time.high - time.median]]
            axis.errorbar(time.median, y, xerr=errors, color="black", linewidth=1, capsize=3)
        remark, end = _remark(comparison, row), (time.high, y)
        axis.annotate(remark, end, xytext=(6, 0), textcoords="offset points", fontsize=9, va="center")
    values = [[value_text(row.values.get(column, NOTHING)) for column in comparison.columns] for row in rows]
    labels = [textwrap.fill(", ".join(texts) or "all runs", LABEL, max_lines=2, placeholder=" …") for texts in values]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    # The layout makes room for the remarks on the right.
    axis.set_xlim(0, 1.01 * max(row.epoch_s.high for row in rows if row.epoch_s))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("seconds per epoch, evaluation included (median of runs; whiskers: range; × the fastest)")
    titles = [f"Time per epoch by {', '.join(comparison.columns)}".removesuffix(" by "), comparison.place]
    lines = [line for title in titles for line in textwrap.wrap(title, TITLE, max_lines=3, placeholder=" …")]
    axis.set_title("\n".join(lines), fontsize=10, loc="left")
    axis.grid(True, axis="x", color="#777777", alpha=0.3)
    axis.set_axisbelow(True)


def _loader(row: Configuration) -> str:
    """The loader of a row as a key of `COLOURS`."""
    name = str(row.runs[0].config.get("data.loader.name"))
    return name if name in COLOURS else OTHER


def _phases(row: Configuration) -> tuple[float, float, float]:
    """Seconds of an epoch spent waiting, computing and on the rest, which add up to its median time."""
    assert row.epoch_s
    epoch, wait, compute = row.epoch_s.median, row.spread("data_wait_s"), row.spread("compute_s")
    waiting = wait.median if wait else 0.0
    # The medians may come from different runs, so the two could exceed the epoch.
    computing = min(compute.median if compute else 0.0, epoch - waiting)
    return waiting, computing, epoch - waiting - computing


def _remark(comparison: Comparison, row: Configuration) -> str:
    assert row.epoch_s
    time = f"{seconds(row.epoch_s.median)} s (n={row.epoch_s.n})"
    if not row.rounds:
        return f"{time}, not ranked: {textwrap.shorten(row.status, 40, placeholder=' …')}"
    ratio = to_fastest(comparison, row)
    return f"{time}, × {ratio}" if ratio else time
