"""The picture of a report: time over batch size, and what an epoch is spent on. Readable without colours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitmnist.report.compare import Cell, Comparison, as_text

# Told apart by marker and dash as well as by lightness.
LINES = [
    ("o", "-", "#000000"),
    ("s", "--", "#b2182b"),
    ("^", "-.", "#2166ac"),
    ("D", ":", "#5aae61"),
    ("v", (0, (5, 1)), "#984ea3"),
    ("P", (0, (3, 1, 1, 1)), "#e08214"),
    ("X", (0, (1, 1)), "#777777"),
]
# In an epoch: label, colour, hatch.
PARTS = [
    ("waiting for data", "#222222", ""),
    ("computing", "#9ecae1", "///"),
    ("other, evaluation included", "#ffffff", ""),
]
WIDTH, LINE_HEIGHT, BAR_HEIGHT = 9.0, 4.2, 0.28


@rc_context({"text.parse_math": False})
def draw(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG: for each comparison a line for each loader, if batch sizes were swept, and a bar for each cell."""
    panels = [(kind, comparison) for comparison in comparisons for kind in _kinds(comparison)]
    heights = [
        LINE_HEIGHT if kind is _lines else 1.3 + BAR_HEIGHT * len(_timed(comparison)) for kind, comparison in panels
    ]
    figure = Figure(figsize=(WIDTH, max(sum(heights), 2.0)), layout="constrained")
    FigureCanvasAgg(figure)
    if panels:
        axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, (kind, comparison) in zip(axes, panels, strict=True):
            kind(axis, comparison)
            if len(comparisons) > 1:
                axis.set_title(comparison.place(), fontsize=9, loc="right")
    else:
        figure.text(0.5, 0.5, "no epoch has been measured yet", ha="center", va="center")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def _kinds(comparison: Comparison) -> list[Callable[[Axes, Comparison], None]]:
    if not comparison.measured:
        return []
    return [_lines, _bars] if comparison.batch_sizes() else [_bars]


def _timed(comparison: Comparison) -> list[Cell]:
    return [cell for cell in comparison.cells if cell.epoch_s]


def _lines(axis: Axes, comparison: Comparison) -> None:
    """Seconds of an epoch over batch size, both logarithmic; a line for each combination of all else."""
    others = [column for column in comparison.columns if column != "batch_size"]
    lines: dict[str, list[Cell]] = {}
    for cell in _timed(comparison):
        values = (as_text(comparison.value(cell, column)) for column in others)
        lines.setdefault(", ".join(values), []).append(cell)
    sizes = set()
    for number, (label, cells) in enumerate(lines.items()):
        cells.sort(key=lambda cell: int(comparison.value(cell, "batch_size")))
        marker, dash, colour = LINES[number % len(LINES)]
        x = [comparison.value(cell, "batch_size") for cell in cells]
        y = [cell.epoch_s for cell in cells if cell.epoch_s]
        sizes.update(x)
        axis.errorbar(
            x,
            [time.median for time in y],
            yerr=[[time.median - time.low for time in y], [time.high - time.median for time in y]],
            marker=marker,
            linestyle=dash,
            color=colour,
            label=label or None,
            capsize=3,
            linewidth=1.4,
            markersize=5,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    low, high = axis.get_ylim()
    # A decade of a logarithmic axis has few ticks of its own.
    within_a_decade = ticker.MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10])
    axis.yaxis.set_major_locator(within_a_decade if high < 10 * low else ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("batch size")
    axis.set_ylabel("epoch, s (median, range)")
    axis.grid(True, which="major", color="#dddddd")
    if others:
        axis.legend(title=", ".join(others), fontsize=8, title_fontsize=8)


def _bars(axis: Axes, comparison: Comparison) -> None:
    """A bar for each cell: waiting, computing, and what is left of the epoch."""
    cells = _timed(comparison)
    places = range(len(cells))
    left = [0.0] * len(cells)
    for part, (label, colour, hatch) in enumerate(PARTS):
        widths = [_parts(cell)[part] for cell in cells]
        axis.barh(places, widths, left=left, color=colour, hatch=hatch, edgecolor="#222222", linewidth=0.6, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_yticks(places, [", ".join(map(as_text, cell.values)) or "the run" for cell in cells], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds of an epoch (median)")
    if comparison.columns:
        axis.set_ylabel(", ".join(comparison.columns), fontsize=8)
    axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False)


def _parts(cell: Cell) -> tuple[float, float, float]:
    assert cell.epoch_s
    assert cell.data_wait_s
    assert cell.compute_s
    waiting, computing = cell.data_wait_s.median, cell.compute_s.median
    return waiting, computing, max(cell.epoch_s.median - waiting - computing, 0.0)
