"""Draws the README's chart, in light and dark, from the recorded sweep over loaders and batch sizes.

python -m docs.scripts.loader_chart benchmarks/results/sweep-cpu/report.csv docs/pictures
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitmnist.timing.table import format_seconds

# The colours of text, of the slowest loader, and of the others
THEMES = {"light": ("#1f2328", "#c2410c", "#9aa4af"), "dark": ("#e6edf3", "#fb923c", "#6b7682")}
BACKGROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
# The sweep is `SWEEP` in benchmarks/all.py.
SUBTITLE = "Seconds per epoch of a CNN on 6,000 MNIST images, evaluation included"
CAPTION = (
    "Median of three runs on two CPU cores. ×: the seconds shown, divided by the lowest at this batch size.\n"
    "Waiting below 1% of the epoch is not drawn."
)
MIN_SHARE = 0.01
"""A smaller share of waiting is not drawn: it would be narrower than a line of the hatching."""
Times = dict[str, tuple[float, float]]
"""The median seconds of an epoch and of its waiting, by loader."""


def read_times(table: Path) -> dict[str, Times]:
    """Read the times by batch size, ascending, with the loaders in one order: the lowest total first."""
    times: dict[str, Times] = defaultdict(dict)
    with table.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            times[row["batch_size"]][row["data/loader"]] = float(row["epoch_s"]), float(row["data_wait_s"])
    loaders = sorted(times[row["batch_size"]], key=lambda loader: sum(times[size][loader][0] for size in times))
    return {size: {loader: times[size][loader] for loader in loaders} for size in sorted(times, key=int)}


def printed_ratio(seconds: float, fastest: float) -> str:
    """Divide the seconds as they are printed, so that a reader finds the same ratio."""
    return f"{float(format_seconds(seconds)) / float(format_seconds(fastest)):.1f}"


def draw(times: dict[str, Times], theme: str) -> Figure:
    """Draw a panel for each batch size, with the same rows and the same scale."""
    text, slow, other = THEMES[theme]
    longest = max(seconds for by_loader in times.values() for seconds, _ in by_loader.values())
    with rc_context({"hatch.linewidth": 1.5, "font.size": 13.5, "text.color": text}):
        figure = Figure(figsize=(12, 4.2), facecolor=BACKGROUNDS[theme])
        titles = []
        for number, (size, by_loader) in enumerate(times.items()):
            axes = figure.add_axes((0.145 + number * 0.86 / len(times), 0.19, 0.8 / len(times), 0.61))
            axes.text(0, -0.8, f"batch size {size}", va="center", weight="bold")
            (fastest, _), (slowest, _) = min(by_loader.values()), max(by_loader.values())
            for position, (loader, (seconds, waiting)) in enumerate(by_loader.items()):
                is_slowest, drawn = seconds == slowest, waiting * (waiting >= MIN_SHARE * seconds)
                colour = slow if is_slowest else other
                axes.barh(position, drawn, 0.66, facecolor="none", edgecolor=colour, hatch="///")
                axes.barh(position, seconds - drawn, 0.66, left=drawn, color=colour, edgecolor=colour)
                end, weight = f"{format_seconds(seconds)} s", "normal"
                if is_slowest:
                    ratio, weight = printed_ratio(seconds, fastest), "bold"
                    end += f"  {ratio}×"
                    titles.append(f"At batch size {size}, {loader} takes {ratio} times as long as data in memory")
                axes.text(seconds + 0.02 * longest, position, end, va="center", weight=weight)
                if not number:
                    axes.text(-0.03 * longest, position, loader, ha="right", va="center")
            axes.set(xlim=(0, 1.37 * longest), ylim=(len(by_loader) - 0.4, -1.2))
            axes.axis("off")
        figure.text(0.012, 0.915, titles[0], fontsize=18, weight="bold")
        figure.text(0.012, 0.84, SUBTITLE)
        figure.text(0.012, 0.04, CAPTION, fontsize=12, linespacing=1.5)
        waiting_key = Patch(fill=False, hatch="////", edgecolor=slow, label="waiting for data")
        figure.legend(handles=[waiting_key], loc="center right", bbox_to_anchor=(0.99, 0.855), frameon=False)
    return figure


if __name__ == "__main__":
    for theme in THEMES:
        figure = draw(read_times(Path(sys.argv[1])), theme)
        figure.savefig(Path(sys.argv[2]) / f"loaders-{theme}.png", dpi=200, metadata={"Software": None})
