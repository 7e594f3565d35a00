"""Writes a report as `report.md`, `report.html`, `report.csv` and `report.png`, and as text for a terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from markdown import markdown
from tabulate import tabulate

from vitmnist.errors import printable
from vitmnist.report.compare import Comparison
from vitmnist.report.grouping import CHECKSUMS, compare
from vitmnist.report.summary import summary
from vitmnist.report.table import Table, as_csv, table
from vitmnist.runtime.files import write_atomic
from vitmnist.tracking.runs import find_runs, read_run

CHART = "![Seconds per epoch](report.png)"  # in Markdown
FACTS = "machine, software and data"  # folded in Markdown and on the page
LEGEND = """
An epoch is a training pass and the evaluation after it; a run counts with its median epoch, without the first one after
each start. × fastest: geometric mean of the ratios to the row with the lowest median, over the rounds that both have,
with intervals that hold for all pairs at once with a probability of 95% (Tukey's studentised range, rounds as blocks);
a difference lies outside 0.99 to 1.01. Waiting: time without a batch, as a share of the training pass. Accuracy, F1 and
other quality: after the best epoch if there is a validation split, else after the last one; median over the seeds.
Memory: peak resident memory (host), peak tensor memory (GPU).
"""


def write_report(folders: Iterable[Path], output: Path, with_chart: bool = True) -> list[Comparison]:
    """Write the report on all runs in or below some folders, and return its comparisons.

    Args:
        with_chart: draw the chart, which imports matplotlib; otherwise an earlier one is removed.

    Raises:
        DataError: a folder does not exist, or contains no runs.
        OSError: the files cannot be written.
    """
    found = find_runs(folders)
    output.mkdir(parents=True, exist_ok=True)
    # No lock: each file is replaced as a whole, and a sweep writes its report once more after the last job.
    comparisons = compare([read_run(folder) for folder in found])
    text, svg = as_markdown(comparisons, with_chart), None
    (output / "report.png").unlink(missing_ok=True)
    if with_chart:
        from vitmnist.report.plots import draw  # imports matplotlib, which takes a second

        png, svg = draw(comparisons)
        write_atomic(output / "report.png", png)
    write_atomic(output / "report.csv", as_csv(comparisons).encode())
    write_atomic(output / "report.md", text.encode())
    write_atomic(output / "report.html", as_html(text, svg).encode())
    return comparisons


def as_markdown(comparisons: Sequence[Comparison], with_chart: bool = True) -> str:
    """The report as Markdown; its chart is `report.png` in the same folder."""
    chart = [CHART] if with_chart else []
    blocks = (_rendered(block, _escape, "github") for block in _blocks(comparisons))
    return "\n\n".join(["# Report", *chart, *blocks, LEGEND.lstrip()])


def as_html(text: str, svg: str | None) -> str:
    """The Markdown report as a page that needs no other file, with `svg` in place of the chart."""
    body = markdown(text, extensions=["tables", "md_in_html"], output_format="html")
    # Wide tables scroll within their own box, which the keyboard can reach.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    if svg:
        chart = svg.replace("<svg", '<svg role="img" aria-label="Seconds per epoch"', 1)
        body = body.replace(markdown(CHART, output_format="html"), chart)
    return files("vitmnist.report").joinpath("page.html").read_text(encoding="utf-8").replace("BODY", body)


def as_text(comparisons: Sequence[Comparison]) -> str:
    """The report for a terminal, without the facts about machine and software."""
    return "\n\n".join(_rendered(block, _line, "simple") for block in _blocks(comparisons, with_facts=False))


def _blocks(comparisons: Sequence[Comparison], with_facts: bool = True) -> Iterator[str | Table]:
    """Headings, paragraphs and tables."""
    several = len(comparisons) > 1
    if several:
        facts = [comparison.facts for comparison in comparisons]
        titles = {"machines": ("host", "cpu", "cpu count"), "datasets": ("data", CHECKSUMS)}
        counts = {noun: len({tuple(map(fact.get, keys)) for fact in facts}) for noun, keys in titles.items()}
        differing = " and ".join(f"{count} {noun}" for noun, count in counts.items() if count > 1)
        yield f"These runs are from {differing}, which are not compared with each other."
    for number, comparison in enumerate(comparisons, 1):
        if several:
            yield f"## {number}. {comparison.machine_and_data}"
        yield from summary(comparison)
        yield table(comparison)
        if with_facts and comparison.facts:
            yield [FACTS, ""], [list(fact) for fact in comparison.facts.items()]


def _rendered(block: str | Table, clean: Callable[[str], str], table_format: str) -> str:
    if isinstance(block, str):
        return clean(block)
    header, *rows = ([clean(cell) for cell in row] for row in (block[0], *block[1]))
    table = str(tabulate(rows, header, tablefmt=table_format, disable_numparse=True))
    if header[0] != FACTS:
        return table
    return f'<details markdown="1"><summary>{FACTS}</summary>\n\n{table}\n\n</details>'


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _escape(text: str) -> str:
    """One line that Markdown and HTML show as it is. An underscore within a word, as in gpu_slice, is not a mark."""
    special = r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, r"\\\g<0>", html.escape(_line(text), quote=False))
