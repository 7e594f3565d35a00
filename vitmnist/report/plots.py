"""Draws the panels of a report: the quality, the time and the loss curves of the configurations."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from vitmnist.config.schema import format_value
from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import COMPUTE_S, DATA_WAIT_S
from vitmnist.report.comparison import LOADER, Comparison, ReportRow
from vitmnist.report.summary import format_quality
from vitmnist.timing.table import format_seconds

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The colours of the loaders, in turn; distinguishable with any colour vision (Okabe and Ito, Color Universal Design,
2008)."""
PHASES: dict[str, dict[str, Any]] = {
    "waiting for data": {"fill": False, "hatch": "/////"},
    "computing": {},
    "other": {"alpha": 0.35},
}
"""The parts of an epoch and their styles; `other` is evaluation and saving. The loader determines the colour."""
CURVES: dict[str, Any] = {"best": (COLOURS[0], "-"), "median": (COLOURS[2], "--"), "worst": (COLOURS[5], ":")}
"""The colours and line styles of the loss curves."""
WIDTH, ROW_HEIGHT, CURVES_HEIGHT = 4.3, 0.44, 2.1
"""The width of a panel, and the heights of a row and of the loss curves, in inches."""
TOP, BOTTOM, MARGIN = 0.7, 0.5, 0.1
"""The space of title and legend, of the labels of the axis, and at the sides, in inches."""
STYLE = Path(__file__).with_name("panels.mplstyle")
"""The file of fonts and other styles."""
MAX_ROWS, LINE_LENGTH = 30, 48
"""The numbers of rows in a panel at most, and of characters that fit in its width."""


@rc_context(fname=STYLE)
def draw_panels(comparison: Comparison) -> dict[str, bytes]:
    """Draw the panels of a comparison that have any values, as PNG images by title."""
    panels = {}
    for figure in draw_figures(comparison):
        png = io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        panels[figure.get_suptitle()] = png.getvalue()
    return panels


def join_panels(panels: Iterable[bytes]) -> bytes:
    """Place panels side by side in a PNG image."""
    images = [Image.open(io.BytesIO(panel)) for panel in panels]
    joined = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), "white")
    for position, image in enumerate(images):
        joined.paste(image, (position * images[0].width, 0))
    png = io.BytesIO()
    joined.save(png, format="png")
    return png.getvalue()


def draw_figures(comparison: Comparison) -> Iterator[Figure]:
    """Draw the quality if it differs, the times, and the loss curves."""
    rows = [row for row in comparison.sorted_rows if row.epoch_s][:MAX_ROWS]
    if comparison.quality_differs:
        yield _draw_quality(comparison, rows)
    if rows:
        yield _draw_times(comparison, rows)
    curves: dict[tuple[float, ...], str] = {}
    for run in map(comparison.best_run, comparison.sorted_rows):
        if run.result.status == "completed" and len(run.result.epochs) > 1:
            # Configurations with equal losses, as with other loaders, have one curve.
            curves.setdefault(tuple(epoch["eval_loss"] for epoch in run.result.epochs), run.folder.name)
    if curves:
        ranked = [*curves.items()]
        if not comparison.quality_differs:  # The rows are in the order of their times.
            ranked.sort(key=lambda curve: min(curve[0]))
        yield _draw_curves(ranked)


def _draw_quality(comparison: Comparison, rows: Sequence[ReportRow]) -> Figure:
    """Draw a dot for each seed, and a diamond for their median."""
    metric = comparison.metric
    qualities = [[*row.quality_by_seed(metric.name).values()] for row in rows]
    texts = [format_quality(metric, median(values)) if values else "" for values in qualities]
    dot: dict[str, Any] = {"color": COLOURS[0], "linestyle": "", "marker": "o", "markersize": 5, "alpha": 0.5}
    diamond = dot | {"marker": "D", "markersize": 6, "alpha": 1, "markeredgecolor": "white"}
    legend = [Line2D([], [], label="a seed", **dot), Line2D([], [], label="median", **diamond)]
    figure, axes = _create_panel((metric.column or metric.name).capitalize(), legend, ROW_HEIGHT * len(rows))
    _label_rows(axes, rows, texts)
    for position, values in enumerate(qualities):
        axes.axhline(position, color="#dddddd", linewidth=1, zorder=0)
        axes.plot(values, [position] * len(values), **dot)
        if values:
            axes.plot(median(values), position, **diamond)
    return figure


def _draw_times(comparison: Comparison, rows: Sequence[ReportRow]) -> Figure:
    """Draw the phases of an epoch as a bar."""
    legend = [Patch(label=name, facecolor="#777777", edgecolor="#777777", **style) for name, style in PHASES.items()]
    figure, axes = _create_panel("Seconds per epoch", legend, ROW_HEIGHT * len(rows))
    ratios = [comparison.ratio(row) for row in rows]
    texts = [f", {'' if ratio.is_clear else '≈'}{ratio.mean:.2f}×" if ratio else "" for ratio in ratios]
    times = [f"{format_seconds(row.epoch_s.median)} s" for row in rows if row.epoch_s]
    _label_rows(axes, rows, [time + text for time, text in zip(times, texts, strict=True)])
    loaders = [*dict.fromkeys(row.values.get(LOADER) for row in comparison.rows)]
    for position, row in enumerate(rows):
        _draw_bar(axes, position, row, COLOURS[loaders.index(row.values.get(LOADER)) % len(COLOURS)])
    axes.set_xlabel("whiskers: range; ≈: within noise of the fastest", loc="left")
    return figure


def _draw_bar(axes: Axes, position: int, row: ReportRow, colour: str) -> None:
    time, wait, compute = row.epoch_s, row.spreads[DATA_WAIT_S.name], row.spreads[COMPUTE_S.name]
    assert time
    # The medians can come from different runs, so their sum could exceed the epoch.
    waiting = wait.median if wait else 0.0
    ends = (waiting, min(waiting + compute.median, time.median) if compute else waiting, time.median)
    start = 0.0
    for style, end in zip(PHASES.values(), ends, strict=True):
        axes.barh(position, end - start, 0.4, left=start, facecolor=colour, edgecolor=colour, linewidth=0.6, **style)
        start = end
    if time.n > 1:
        whiskers = [[time.median - time.low], [time.high - time.median]]
        axes.errorbar(time.median, position, xerr=whiskers, color="black", linewidth=1, capsize=3)


def _draw_curves(ranked: Sequence[tuple[Sequence[float], str]]) -> Figure:
    """Draw the best, the median and the worst of some curves with their labels, the best first."""
    # With fewer than three curves, a later name replaces an earlier one.
    names = {len(ranked) // 2: "median", len(ranked) - 1: "worst", 0: "best"}
    lines = []
    for index, name in sorted(names.items()):
        losses, label = ranked[index]
        text = _shorten(f"{name}: {label}", LINE_LENGTH)
        colour, style = CURVES[name]
        epochs = range(1, len(losses) + 1)
        lines.append(Line2D(epochs, losses, color=colour, linestyle=style, marker=".", label=text))
    figure, axes = _create_panel("Evaluation loss by epoch", lines, CURVES_HEIGHT, columns=1, left=0.5)
    for line in lines:
        axes.add_line(line)
    axes.autoscale_view()
    axes.locator_params(axis="x", integer=True)
    axes.grid()
    return figure


def _create_panel(
    title: str, legend: Sequence[Any], height: float, columns: int = 3, left: float = MARGIN
) -> tuple[Figure, Axes]:
    """Create a figure with a title, a legend, and below them axes of a height in inches."""
    top = TOP + 0.18 * (len(legend) - 1) * (columns == 1)
    total = top + height + BOTTOM
    figure = Figure(figsize=(WIDTH, total))
    figure.suptitle(title, x=MARGIN / WIDTH, y=1 - MARGIN / total, ha="left", va="top")
    corner = (MARGIN / WIDTH, 1 - 0.4 / total)
    figure.legend(handles=legend, ncols=columns, loc="upper left", bbox_to_anchor=corner)
    axes = figure.add_axes((left / WIDTH, BOTTOM / total, 1 - (left + MARGIN) / WIDTH, height / total))
    return figure, axes


def _label_rows(axes: Axes, rows: Sequence[ReportRow], texts: Sequence[str]) -> None:
    """Write the label of each row, and a text at its right end, above the place for its values."""
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
    for position, (row, text) in enumerate(zip(rows, texts, strict=True)):
        axes.text(0, position - 0.24, _shorten(_label(row), LINE_LENGTH - 4 - len(text)), ha="left", **style)
        axes.text(1, position - 0.24, text, ha="right", **style)
    axes.spines.left.set_visible(False)
    axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.7))


def _label(row: ReportRow) -> str:
    """Name a row by what varies, with the last part of each key: `lr=0.003 loader=ram`."""
    values = [(re.split("[./]", key)[-1], format_value(value)) for key, value in row.values.items()]
    return " ".join(f"{key}={value}" for key, value in values) or "all runs"


def _shorten(text: str, length: int) -> str:
    text = escape_unprintable(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"
