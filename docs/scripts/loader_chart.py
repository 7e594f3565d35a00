"""Draws the README's chart, in light and dark, from the recorded sweep over loaders and batch sizes.

python -m docs.scripts.loader_chart benchmarks/results/sweep-cpu/report.csv docs/pictures
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from vitmnist.timing.table import format_seconds

# The colours of text, of the slowest loader, and of the others
THEMES = {"light": ("#1f2328", "#c2410c", "#9aa4af"), "dark": ("#e6edf3", "#fb923c", "#6b7682")}
BACKGROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
Times = dict[str, tuple[float, float]]
"""The median seconds of an epoch and of its waiting, by loader."""


def read_times(table: Path) -> dict[str, Times]:
    """Read the times by batch size, in ascending order, fastest loader first."""
    times: dict[str, Times] = defaultdict(dict)
    with table.open(encoding="utf-8") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: (int(row["batch_size"]), float(row["epoch_s"]))):
            times[row["batch_size"]][row["data/loader"]] = float(row["epoch_s"]), float(row["data_wait_s"])
    return times


def printed_ratio(seconds: float, fastest: float) -> str:
    """Divide the seconds as they are printed, so that a reader finds the same ratio."""
    return f"{float(format_seconds(seconds)) / float(format_seconds(fastest)):.1f}"


def draw(times: dict[str, Times], theme: str) -> Figure:
    """Draw one panel with a header for each batch size."""
    text, slow, other = THEMES[theme]
    with rc_context({"hatch.linewidth": 1.2, "font.size": 12, "text.color": text}):
        figure = Figure(figsize=(12, 4.2), facecolor=BACKGROUNDS[theme])
        axes = figure.add_axes((0.135, 0.1, 0.845, 0.77))
        position = 0.0
        for size, by_loader in times.items():
            slowest, fastest = list(by_loader)[-1], next(iter(by_loader.values()))[0]
            axes.text(-0.012, position, f"batch size {size}", ha="right", va="center", weight="bold")
            for loader, (seconds, waiting) in by_loader.items():
                position += 1
                colour = slow if loader == slowest else other
                axes.barh(position, waiting, 0.66, facecolor="none", edgecolor=colour, hatch="////", linewidth=0)
                axes.barh(position, seconds - waiting, 0.66, left=waiting, color=colour)
                ratio = f"   {printed_ratio(seconds, fastest)}×" if loader == slowest else ""
                end = f"{format_seconds(seconds)} s{ratio}"
                weight = "bold" if ratio else "normal"
                axes.text(seconds + 0.015, position, end, va="center", weight=weight)
                axes.text(-0.012, position, loader, ha="right", va="center")
            position += 1.4
        size, by_loader = next(iter(times.items()))
        (slowest, (seconds, _)), fastest = list(by_loader.items())[-1], next(iter(by_loader.values()))[0]
        ratio = printed_ratio(seconds, fastest)
        title = f"At batch size {size}, {slowest} takes {ratio} times as long as data in memory"
        figure.text(0.012, 0.925, title, fontsize=16, weight="bold")
        caption = (
            "Seconds per epoch, evaluation included: median of three runs on two CPU cores. "
            "Hatched: waiting for data. ×: the seconds divided by the lowest of this batch size."
        )
        figure.text(0.012, 0.03, caption, fontsize=10)
        axes.set(xlim=(0, 1.16 * max(time for row in times.values() for time, _ in row.values())))
        axes.set_ylim(position - 0.7, -0.6)
        axes.axis("off")
    return figure


if __name__ == "__main__":
    for theme in THEMES:
        figure = draw(read_times(Path(sys.argv[1])), theme)
        figure.savefig(Path(sys.argv[2]) / f"loaders-{theme}.png", dpi=200, metadata={"Software": None})
