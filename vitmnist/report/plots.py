"""Draws the panels of a report: the quality, the time and the loss curves of the configurations."""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import COMPUTE_S, DATA_WAIT_S, build_epoch_table
from vitmnist.report.comparison import Comparison, ReportRow, round_floats
from vitmnist.report.summary import describe_ratio
from vitmnist.timing.table import Spread, format_seconds

BLUE, GREEN, ORANGE, GREY = "#0072B2", "#009E73", "#D55E00", "#6E7781"
"""Colours that are distinguishable with any colour vision (Okabe and Ito, Color Universal Design, 2008)."""
PHASES: dict[str, dict[str, Any]] = {
    "waiting": {"fill": False, "hatch": "/////"},
    "training": {},
    "evaluation, saving": {"alpha": 0.35},
}
"""The parts of an epoch and their styles."""
CURVES: dict[str, Any] = {"best": (BLUE, "-"), "middle": (GREEN, "--"), "worst": (ORANGE, ":")}
"""The colours and line styles of the loss curves."""
WIDTH, ROW_HEIGHT, CURVES_HEIGHT = 3.5, 0.44, 2.1
"""The width of a panel, and the heights of a row and of the loss curves, in inches."""
TOP, BOTTOM, MARGIN = 0.7, 0.5, 0.1
"""The space of title and legend, of the labels of the axis, and at the sides, in inches."""
STYLE = Path(__file__).with_name("panels.mplstyle")
"""The file of fonts and other styles."""
STACK_STEP, DOT_WIDTH = 0.12, 0.025
"""How far a dot is moved up from another at its place, in rows, and the width of a dot, as a share of the axis."""
MIN_SHARE = 0.02
"""A smaller share of waiting is not drawn: it would be narrower than a line of the hatching."""
MAX_ROWS, LINE_LENGTH = 30, 38
"""The numbers of rows in a panel at most, and of characters that fit in its width."""


@rc_context(fname=STYLE)
def draw_panels(comparison: Comparison) -> dict[str, bytes]:
    """Draw the panels of a comparison that have any values, as PNG images by title."""
    panels: dict[str, bytes] = {}
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
    """Draw the quality if settings or seeds differ, the times, and the loss curves."""
    rows = [row for row in comparison.sorted_rows if row.epoch_s][:MAX_ROWS]
    if len({value for values in comparison.quality_by_seed.values() for value in values.values()}) > 1:
        yield _draw_quality(comparison)
    if rows:
        yield _draw_times(comparison, rows)
    curves: dict[tuple[float, ...], str] = {}
    for row in comparison.sorted_rows:
        setting = row.label_without_loader
        drawn = [comparison.best_run(row)] if setting else row.runs
        for run in drawn:
            if run.result.status == "completed" and len(run.result.epochs) > 2:  # Two points are no curve.
                # Runs with equal losses, as with other loaders, have one curve.
                losses = tuple(epoch["eval_loss"] for epoch in run.result.epochs)
                curves.setdefault(losses, setting or run.seed_overrides)
    if curves:
        ranked = [*curves.items()]
        if not comparison.quality_differs:  # The rows are in the order of their times.
            ranked.sort(key=lambda curve: min(curve[0]))
        has_seeds = any(len(row.runs_by_seed) > 1 for row in rows if row.label_without_loader)
        label_below = "epoch; the best seed of each" if has_seeds else "epoch"
        yield _draw_curves(comparison.title(build_epoch_table()["eval_loss"]), label_below, ranked)


def _draw_quality(comparison: Comparison) -> Figure:
    """Draw a dot for each seed, and over the dots a tick for their mean. All loaders of a setting have one row."""
    metric = comparison.metric
    groups = [*comparison.quality_by_seed.items()][:MAX_ROWS]
    dot: dict[str, Any] = {"color": BLUE, "linestyle": "", "marker": "o", "markersize": 5.5, "markeredgecolor": "white"}
    tick: dict[str, Any] = {"color": "black", "linestyle": "", "marker": "|", "markersize": 13, "markeredgewidth": 2}
    legend = [Line2D([], [], label="a seed", **dot), Line2D([], [], label="mean", **tick)]
    if all(len(values) == 1 for _, values in groups):
        legend = legend[:1]
    figure, axes = _create_rows(comparison.title(metric), legend, len(groups))
    labels = {"validation": "after the best epoch", "test": "after the last epoch"}
    axes.set_xlabel(labels.get(comparison.eval_split, ""), loc="left")
    every_value = [value for _, values in groups for value in values.values()]
    width = DOT_WIDTH * (max(every_value) - min(every_value))
    for position, (label, by_seed) in enumerate(groups):
        values = sorted(by_seed.values())
        mean = fmean(values)
        _label_row(axes, position, label or "all runs", metric.format(mean))
        axes.axhline(position, color="#dddddd", linewidth=1, zorder=0)
        if len(values) > 1:
            axes.plot(mean, position, zorder=3, **tick)
        overlapped = [sum(other > value - width for other in values[:index]) for index, value in enumerate(values)]
        axes.plot(values, [position - STACK_STEP * count for count in overlapped], **dot)
    return figure


def _draw_times(comparison: Comparison, rows: Sequence[ReportRow]) -> Figure:
    """Draw the phases of an epoch as a bar per row. If loaders are compared, their settings, if any, are headings."""
    has_headings = any(comparison.time_groups)
    lines: list[ReportRow | str] = []
    for row in rows:
        if has_headings and row.label_without_loader not in lines:
            lines.append(row.label_without_loader)
        lines.append(row)
    is_compared = any(map(comparison.ratio_to_baseline, rows))
    # Grey bars and the label below them say that the differences may be noise.
    colour = BLUE if is_compared or len(rows) == 1 else GREY
    shown = [name for name in PHASES if name != "waiting" or any(map(_waiting_s, rows))]
    legend = [Patch(label=name, facecolor=colour, edgecolor=colour, **PHASES[name]) for name in shown]
    figure, axes = _create_rows("Seconds per epoch", legend, len(lines))
    axes.set_ylim(top=-0.1 if has_headings else None)
    for position, line in enumerate(lines):
        if isinstance(line, str):
            axes.text(0, position + 0.3, _shorten(line, LINE_LENGTH), weight="bold")
        elif line.epoch_s:
            texts = [f"{format_seconds(line.epoch_s.median)} s", describe_ratio(comparison, line)]
            label = line.loader if has_headings else line.label or "all runs"
            _label_row(axes, position, label, ", ".join(filter(None, texts)))
            _draw_bar(axes, position, line, line.epoch_s, colour)
    axes.xaxis.set_major_formatter("{x:g}")  # `0.000` would be cut at the left.
    keys = []
    if any(row.epoch_s and row.epoch_s.n > 1 for row in rows):
        keys.append("whiskers: range")
    elif any(row.rounds for row in rows):  # Runs that overlapped have no rounds.
        keys.append("one round")
    if is_compared:
        keys.append("×: to the fastest of its setting" if has_headings else "×: to the fastest")
    elif len(rows) > 1:
        keys.append("not compared")
    axes.set_xlabel("; ".join(keys), loc="left")
    return figure


def _waiting_s(row: ReportRow) -> float:
    wait = row.spreads[DATA_WAIT_S.name]
    return wait.median if wait and wait.median >= MIN_SHARE * row.median_s else 0.0


def _draw_bar(axes: Axes, position: int, row: ReportRow, time: Spread, colour: str) -> None:
    waiting = _waiting_s(row)
    compute = row.spreads[COMPUTE_S.name]
    # The medians can come from different runs, so their sum could exceed the epoch.
    training_end = min(waiting + compute.median, time.median) if compute else waiting
    start = 0.0
    for style, end in zip(PHASES.values(), (waiting, training_end, time.median), strict=True):
        axes.barh(position, end - start, 0.4, left=start, facecolor=colour, edgecolor=colour, linewidth=0.6, **style)
        start = end
    if time.n > 1:
        whiskers = [[time.median - time.low], [time.high - time.median]]
        for color, width in (("white", 3), ("black", 1)):  # A white edge separates black whiskers from the bar.
            axes.errorbar(time.median, position, xerr=whiskers, color=color, lw=width, capthick=width, capsize=3)


def _draw_curves(title: str, label_below: str, ranked: Sequence[tuple[Sequence[float], str]]) -> Figure:
    """Draw the curves of the best, the middle and the worst setting, or run; `ranked` has the best first."""
    # With fewer than three curves, a later name replaces an earlier one.
    names = {len(ranked) // 2: "middle", len(ranked) - 1: "worst", 0: "best"}
    lines = []
    for index, name in sorted(names.items()):
        losses, label = ranked[index]
        colour, style = CURVES[name]
        text = _shorten(f"{name}: {label}", LINE_LENGTH - 6)
        lines.append(Line2D(range(1, len(losses) + 1), losses, color=colour, linestyle=style, marker=".", label=text))
    figure, axes = _create_panel(title, lines, CURVES_HEIGHT, columns=1, left=0.5)
    axes.set_xlabel(label_below, loc="left")
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
    top = TOP + 0.18 * ((len(legend) - 1) // columns)  # Each further line of the legend takes 0.18 inches.
    total = top + height + BOTTOM
    figure = Figure(figsize=(WIDTH, total))
    figure.suptitle(title[0].upper() + title[1:], x=MARGIN / WIDTH, y=1 - MARGIN / total, ha="left", va="top")
    corner = (MARGIN / WIDTH, 1 - 0.4 / total)
    figure.legend(handles=legend, ncols=columns, loc="upper left", bbox_to_anchor=corner)
    return figure, figure.add_axes((left / WIDTH, BOTTOM / total, 1 - (left + MARGIN) / WIDTH, height / total))


def _create_rows(title: str, legend: Sequence[Any], count: int) -> tuple[Figure, Axes]:
    """Create a panel of rows, at the positions 0, 1, … from the top."""
    figure, axes = _create_panel(title, legend, ROW_HEIGHT * count)
    axes.spines.left.set_visible(False)
    axes.set(yticks=[], ylim=(count - 0.6, -0.7))
    axes.locator_params(axis="x", nbins=6)
    return figure, axes


def _label_row(axes: Axes, position: int, label: str, text: str) -> None:
    """Write the label of a row, and a text at its right end, above the place for its values."""
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
    axes.text(0, position - 0.24, _shorten(label, LINE_LENGTH - 3 - len(text)), ha="left", **style)
    axes.text(1, position - 0.24, text, ha="right", **style)


def _shorten(text: str, length: int) -> str:
    text = escape_unprintable(round_floats(text))
    return text if len(text) <= length else f"{text[: length - 1]}…"
