"""Draws the README's chart, wide and narrow, in light and dark, from the recorded sweep over loaders and batch sizes.

python -m docs.scripts.loader_chart benchmarks/results/sweep-cpu/report.csv docs/pictures
"""

import csv
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# The colours of text, of the slowest loader, and of the others
THEMES = {"light": ("#1f2328", "#c2410c", "#9aa4af"), "dark": ("#e6edf3", "#fb923c", "#6b7682")}
BACKGROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
# The sweep is `SWEEP` in benchmarks/all.py.
SUBTITLE = "Seconds per epoch of a CNN on 6,000 MNIST images"
CAPTION = (
    "Bars: median of five runs on two CPU cores, evaluation included; whiskers: their range. ×: the seconds divided by "
    "those of the fastest loader at that batch size. The two workers of disk share the cores with training, so its "
    "steps are slower too."
)
LABELS = {"gpu_slice": "gpu_slice\n(host memory)"}
"""The labels of rows that differ from the name of the loader. The sweep ran without a GPU."""
MIN_SHARE = 0.02
"""A smaller share of waiting is not drawn: it would be narrower than a line of the hatching."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of the chart are, as shares of its size in inches, and how large its texts are, in points.

    Args:
        panels: left, bottom, width and height of the panel of each batch size.
        tops: the upper edges of the title, the subtitle and the legend.
        wrap: the characters of a line of the title and of the caption.
    """

    size: tuple[float, float]
    panels: tuple[tuple[float, float, float, float], ...]
    tops: tuple[float, float, float]
    wrap: tuple[int, int]
    title_points: float
    points: float
    caption_points: float


LAYOUTS = {
    "": Layout(
        size=(12, 4.2),
        panels=((0.145, 0.17, 0.42, 0.56), (0.575, 0.17, 0.42, 0.56)),
        tops=(0.975, 0.885, 0.84),
        wrap=(90, 125),
        title_points=18,
        points=13.5,
        caption_points=12,
    ),
    "-narrow": Layout(  # A phone shows it 360 pixels wide.
        size=(5.1, 6.5),
        panels=((0.285, 0.51, 0.7, 0.28), (0.285, 0.205, 0.7, 0.28)),
        tops=(0.985, 0.895, 0.866),
        wrap=(36, 62),
        title_points=15,
        points=11.5,
        caption_points=10.5,
    ),
}
"""The layouts by the suffix of their file names."""


class Time(NamedTuple):
    """The median and the range of the seconds of an epoch, and the median of its waiting."""

    seconds: float
    low: float
    high: float
    waiting: float


Times = dict[str, Time]
"""The times of an epoch, by loader."""


def read_times(table: Path) -> dict[str, Times]:
    """Read the times by batch size, ascending, with the loaders in one order: the lowest total first."""
    times: dict[str, Times] = defaultdict(dict)
    with table.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            columns = ("epoch_s", "epoch_s_low", "epoch_s_high", "data_wait_s")
            times[row["batch_size"]][row["data/loader"]] = Time(*(float(row[column]) for column in columns))
    loaders = sorted(times[row["batch_size"]], key=lambda loader: sum(times[size][loader].seconds for size in times))
    return {size: {loader: times[size][loader] for loader in loaders} for size in sorted(times, key=int)}


def printed_ratio(seconds: float, fastest: float) -> str:
    """Divide the seconds as they are printed, so that a reader finds the same ratio."""
    return f"{round(seconds, 2) / round(fastest, 2):.2f}"


def draw(times: dict[str, Times], theme: str, layout: Layout) -> Figure:
    """Draw a panel for each batch size, with the same rows and the same scale."""
    text, slow, other = THEMES[theme]
    longest = max(time.high for by_loader in times.values() for time in by_loader.values())
    with rc_context({"hatch.linewidth": 1.3, "font.size": layout.points, "text.color": text}):
        figure = Figure(figsize=layout.size, facecolor=BACKGROUNDS[theme])
        ratios, slowest = [], ""
        for (size, by_loader), panel in zip(times.items(), layout.panels, strict=True):
            axes = figure.add_axes(panel)
            axes.text(0, -0.85, f"batch size {size}", va="center", weight="bold")
            fastest, slowest = min(by_loader.values()), max(by_loader, key=by_loader.__getitem__)
            for position, (loader, time) in enumerate(by_loader.items()):
                waiting = time.waiting * (time.waiting >= MIN_SHARE * time.seconds)
                colour = slow if loader == slowest else other
                axes.barh(position, waiting, 0.66, facecolor="none", edgecolor=colour, hatch="///")
                axes.barh(position, time.seconds - waiting, 0.66, left=waiting, color=colour, edgecolor=colour)
                reach = [[time.seconds - time.low], [time.high - time.seconds]]
                # An edge in the colour of the background separates whiskers from the bar.
                for line, width in ((BACKGROUNDS[theme], 2.4), (text, 0.8)):
                    axes.errorbar(time.seconds, position, xerr=reach, color=line, lw=width, capthick=width, capsize=3)
                ratio, weight = printed_ratio(time.seconds, fastest.seconds), "normal"
                if loader == slowest:
                    ratios.append(ratio)
                    weight = "bold"
                label = f"{time.seconds:.2f} s · {ratio}×"
                axes.text(time.high + 0.02 * longest, position, label, va="center", weight=weight)
                # Panels side by side share the labels of the first one.
                if panel[0] == layout.panels[0][0]:
                    label = LABELS.get(loader, loader)
                    axes.text(-0.03 * longest, position, label, ha="right", va="center", linespacing=1)
            axes.set(xlim=(0, 1.58 * longest), ylim=(len(by_loader) - 0.4, -1.3))
            axes.axis("off")
        add_texts(figure, layout, slowest, ratios, other)
    return figure


def add_texts(figure: Figure, layout: Layout, slowest: str, ratios: list[str], colour: str) -> None:
    """Add the title, the subtitle, the legend and the caption."""
    low, high = min(ratios, key=float), max(ratios, key=float)
    title = f"The {slowest} loader takes {low} to {high} times as long as the fastest loader"
    title, caption = (textwrap.fill(*texts) for texts in zip((title, CAPTION), layout.wrap, strict=True))
    left, (title_top, subtitle_top, legend_top) = 0.13 / layout.size[0], layout.tops
    figure.text(left, title_top, title, fontsize=layout.title_points, weight="bold", va="top", linespacing=1.15)
    figure.text(left, subtitle_top, SUBTITLE, va="top")
    figure.text(left, 0.028, caption, fontsize=layout.caption_points, linespacing=1.3)
    keys = [Patch(fill=False, hatch="////", edgecolor=colour, label="waiting for data")]
    keys.append(Patch(color=colour, label="training steps and evaluation"))
    # Matplotlib puts a margin around a legend.
    figure.legend(
        handles=keys,
        ncols=2,
        loc="upper left",
        bbox_to_anchor=(left - 0.09 / layout.size[0], legend_top),
        frameon=False,
    )


if __name__ == "__main__":
    times = read_times(Path(sys.argv[1]))
    for suffix, layout in LAYOUTS.items():
        for theme in THEMES:
            path = Path(sys.argv[2]) / f"loaders{suffix}-{theme}.png"
            draw(times, theme, layout).savefig(path, dpi=200, metadata={"Software": None})
