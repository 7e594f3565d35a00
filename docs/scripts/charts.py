"""Draws the charts of docs/results.md from the tables in benchmarks/results.

    python docs/scripts/charts.py

The SVG is written directly: its text takes the colour of the page's mode, which matplotlib's cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
WIDTH, BARS = 430, 190  # pixels: the picture, readable on a phone, and the longest bar; the figures are behind it
TOP, ROW, BAR, LINE = 52, 44, 14, 20
# Contrast of at least 3:1 on white and on the dark page.
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.note { fill: #57606a }
.bar { fill: #0f8b8d }
.waiting { fill: #d9822b }
@media (prefers-color-scheme: dark) {
  text { fill: #e2e4e9 }
  .note { fill: #a9b1bd }
}"""


@dataclass(frozen=True)
class Chart:
    """A bar for each row of a table.

    Args:
        source: the file in benchmarks/results.
        heading: of the section whose first table it is; empty for the first one of the file.
        length: the column with the length of a bar.
        note: what is written behind the bar, after the length; {COLUMN} is the row's cell.
        waiting: the column with the part of the bar that is waiting, in percent; None if there is none.
    """

    title: str
    subtitle: str
    source: str
    heading: str
    length: str
    note: str
    waiting: str | None = None


CHARTS_OF_RESULTS = {
    "epoch": Chart(
        "A training epoch of 15,000 images at batch 500",
        "per epoch; × the bare loop, written by hand, with range",
        "epoch-cpu-bs500.md",
        "",
        "seconds",
        "s, × {× bare loop}",
        "waiting for data",
    ),
    "loading": Chart(
        "Loading 60,000 uint8 images at batch 500",
        "per epoch; × the plain loop over float32, with range",
        "loaders-cpu-bs500.md",
        "Delivering uint8",
        "ms an epoch",
        "ms, × {× plain loop} ({range of the ratio})",
    ),
    "augmentation": Chart(
        "Augmenting 512 images of 32×32×3, preset cifar",
        "per batch; × the first row, with range",
        "augment-cpu.md",
        "",
        "ms per batch",
        "ms, × {time over ours}",
    ),
}


def table(source: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading of a Markdown file, by the titles of their columns."""
    text = (RESULTS / source).read_text()
    lines = text[text.index("\n| ", text.index(heading)) :].strip().partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def draw(chart: Chart) -> str:
    """The SVG of a chart."""
    rows = table(chart.source, chart.heading)
    name = next(iter(rows[0]))  # the title of the first column
    scale = BARS / max(float(row[chart.length]) for row in rows)
    parts = [_text(0, 16, chart.title, "title"), _text(0, 36, chart.subtitle, "note")]
    for number, row in enumerate(rows):
        y, length = TOP + ROW * number, scale * float(row[chart.length])
        parts += [_text(0, y + 12, row[name].replace("`", "")), _bar(0, y + LINE, length, "bar")]
        if chart.waiting and (percent := re.match(r"[\d.]+", row[chart.waiting])):
            waiting = length * float(percent[0]) / 100
            parts.append(_bar(length - waiting, y + LINE, waiting, "waiting"))
        parts.append(_text(length + 6, y + LINE + 12, f"{row[chart.length]} {chart.note.format_map(row)}", "note"))
    height = TOP + ROW * len(rows)
    if chart.waiting:
        parts += [_bar(0, height, BAR, "waiting"), _text(BAR + 6, height + 12, chart.waiting, "note")]
        height += LINE
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{chart.title}</title>", f"<style>\n{STYLE}\n</style>", *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'


if __name__ == "__main__":
    for name, chart in CHARTS_OF_RESULTS.items():
        (CHARTS / f"{name}.svg").write_text(draw(chart))
