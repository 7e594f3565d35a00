"""Draws the README's chart, in light and dark, from the recorded sweep over loaders and batch sizes.

python -m docs.scripts.loader_chart benchmarks/results/sweep-cpu/report.csv docs/pictures
"""

import csv
import sys
from collections import defaultdict
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
    "Bars: median of five runs, evaluation included; whiskers: their range. The two\n"
    "workers of disk compete with training for two cores. ×: the seconds divided by\n"
    "the seconds of the fastest loader at that batch size."
)
LABELS = {"gpu_slice": "gpu_slice\n(host memory)"}
"""The labels of rows that differ from the name of the loader. The sweep ran without a GPU."""
MIN_SHARE = 0.02
"""A smaller share of waiting is not drawn: it would be narrower than a line of the hatching."""


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


def draw(times: dict[str, Times], theme: str) -> Figure:
    """Draw a panel for each batch size, one below the other, with the same rows and the same scale.

    The texts are large enough for a phone, which shows the chart 360 pixels wide.
    """
    text, slow, other = THEMES[theme]
    longest = max(time.high for by_loader in times.values() for time in by_loader.values())
    with rc_context({"hatch.linewidth": 1.2, "font.size": 11.5, "text.color": text}):
        figure = Figure(figsize=(6.5, 5.8), facecolor=BACKGROUNDS[theme])
        ratios, slowest = [], ""
        for number, (size, by_loader) in enumerate(times.items()):
            axes = figure.add_axes((0.24, 0.455 - number * 0.325, 0.74, 0.31))
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
                axes.text(time.high + 0.02 * longest, position, f"{time.seconds:.2f} s", va="center", weight=weight)
                axes.text(1.45 * longest, position, f"{ratio}×", ha="right", va="center", weight=weight)
                label = LABELS.get(loader, loader)
                axes.text(-0.03 * longest, position, label, ha="right", va="center", linespacing=1)
            axes.set(xlim=(0, 1.45 * longest), ylim=(len(by_loader) - 0.4, -1.3))
            axes.axis("off")
        low, high = min(ratios, key=float), max(ratios, key=float)
        title = f"The {slowest} loader takes {low} to {high} times\nas long as the fastest loader"
        figure.text(0.02, 0.98, title, fontsize=16, weight="bold", va="top", linespacing=1.15)
        figure.text(0.02, 0.873, SUBTITLE, va="top")
        figure.text(0.02, 0.015, CAPTION, fontsize=10.5, linespacing=1.3)
        keys = [Patch(fill=False, hatch="////", edgecolor=other, label="waiting for data")]
        keys.append(Patch(color=other, label="training steps and evaluation"))
        figure.legend(handles=keys, ncols=2, loc="upper left", bbox_to_anchor=(0.006, 0.848), frameon=False)
    return figure


if __name__ == "__main__":
    for theme in THEMES:
        figure = draw(read_times(Path(sys.argv[1])), theme)
        figure.savefig(Path(sys.argv[2]) / f"loaders-{theme}.png", dpi=200, metadata={"Software": None})
