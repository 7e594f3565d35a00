"""The files of a report, made from one text."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock
from markdown import markdown
from tabulate import tabulate

from vitmnist.report.compare import Comparison, compare
from vitmnist.report.facts import place
from vitmnist.report.plot import draw
from vitmnist.report.runs import find_runs, read_run
from vitmnist.report.summary import summary
from vitmnist.report.table import Rows, articles_table, as_csv, table
from vitmnist.report.text import row_name
from vitmnist.runtime.files import write_whole

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #8888; padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 4rem; }
img { max-width: 100%; background: white; }
"""

READING = (
    "An epoch is its training pass and the evaluation after it. Each run contributes the median of its epochs without "
    "the first; a row shows median and range of its runs, and from six rounds on an interval for the median, whose "
    "coverage assumes that rounds do not depend on each other. × fastest: the median ratio to the row with the lowest "
    "time, over rounds of the same sweep; it is a difference if its interval lies outside of 0.99 to 1.01. Waiting is "
    "the time in which the model had no batch; its share is of the training pass. Accuracy is that after the last "
    "epoch. Memory is the peak of a run: resident on the host, tensors on the GPU."
)


def write_report(folders: Iterable[Path], output: Path) -> list[Comparison]:
    """Write `report.md`, `.html`, `.csv` and `.png` on all runs below some folders; what they compare is returned.

    Raises:
        DataError: a folder that is not there, or holds no run.
        OSError: the files cannot be written.
    """
    found = find_runs(folders)
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / ".report.lock"):  # jobs of a sweep may end at the same time
        comparisons = compare([read_run(folder) for folder in found])
        picture = draw(comparisons)
        text = as_markdown(comparisons)
        write_whole(output / "report.png", picture)
        write_whole(output / "report.csv", as_csv(comparisons).encode())
        write_whole(output / "report.md", text.encode())
        write_whole(output / "report.html", as_html(text, picture).encode())
    return comparisons


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """The whole report; its picture is `report.png` next to it."""
    several = len(comparisons) > 1
    parts = ["# Report", "![Seconds per epoch](report.png)", *([separate(comparisons)] if several else [])]
    for number, comparison in enumerate(comparisons, 1):
        if several:
            parts.append(f"## {number}. {_escaped(place(comparison.facts))}")
        parts += [_escaped(sentence, bold=True) for sentence in summary(comparison)]
        parts.append(_pipe(*table(comparison), bold=False))
        if reasons := not_completed(comparison):
            parts.append("\n".join(["Not completed:", "", *(f"- {_escaped(reason)}" for reason in reasons)]))
        if (articles := articles_table(comparison))[1]:
            parts += ["Median seconds per epoch, as in the articles:", _pipe(*articles, bold=True)]
        parts.append("\n".join(f"- {_escaped(key)}: {_escaped(fact)}" for key, fact in comparison.facts.items()))
    return "\n\n".join(part for part in [*parts, READING] if part) + "\n"


def separate(comparisons: Sequence[Comparison]) -> str:
    """What to say of runs that may not be compared with each other."""
    return (
        f"These runs are of {len(comparisons)} machines or data sets. Each has its own table, and no figure of one is "
        "compared with one of another."
    )


def not_completed(comparison: Comparison) -> list[str]:
    """How each configuration ended of which a run did not complete, in full."""
    return [
        ": ".join(filter(None, [row_name(comparison, row), " ".join(row.status.split())]))
        for row in comparison.rows
        if any(run.status != "completed" for run in row.runs)
    ]


def as_html(text: str, picture: bytes) -> str:
    """The report as one file that needs no other."""
    body = markdown(text, extensions=["tables"], output_format="html")
    embedded = f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"'
    body = body.replace('src="report.png"', embedded)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>vitmnist report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def as_text(comparisons: Sequence[Comparison], width: int = 24) -> str:
    """The tables and the sentences for a terminal; in a table, what is long is cut after `width` characters."""
    parts = [separate(comparisons)] if len(comparisons) > 1 else []
    for comparison in comparisons:
        if len(comparisons) > 1:
            parts.append(f"{place(comparison.facts)}:")
        parts.append(_plain(*table(comparison), width))
        if reasons := not_completed(comparison):
            parts.append("\n".join(["not completed:", *(f"  {reason}" for reason in reasons)]))
        if (articles := articles_table(comparison))[1]:
            parts.append("median seconds per epoch\n" + _plain(*articles, width))
        parts += [sentence.replace("**", "") for sentence in summary(comparison)]
    return "\n\n".join(parts)


def _pipe(header: list[str], rows: Rows, bold: bool) -> str:
    cells = [[_escaped(value, bold) for value in row] for row in rows]
    return str(tabulate(cells, [_escaped(title) for title in header], tablefmt="github", disable_numparse=True))


def _plain(header: list[str], rows: Rows, width: int) -> str:
    cut = [[_cut(" ".join(value.split()).strip("*"), width) for value in row] for row in rows]
    return str(tabulate(cut, header, tablefmt="simple", disable_numparse=True))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _escaped(text: str, bold: bool = False) -> str:
    """Text that Markdown and HTML show as it is; in one line. `bold` leaves `**` as a mark."""
    one_line = html.escape(" ".join(text.split()), quote=False)
    # An underscore within a word, as in gpu_slice, is no mark.
    special = r"[\\`\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])" + ("" if bold else r"|\*")
    return re.sub(special, lambda mark: f"\\{mark[0]}", one_line)
