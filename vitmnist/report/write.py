"""Writes a report as `report.md`, `report.html`, `report.csv` and `report.png`, and as text for a terminal."""

import html
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from markdown import markdown
from tabulate import tabulate

from vitmnist.config.schema import format_value
from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import EPOCH_S, build_epoch_table
from vitmnist.report.comparison import EMPTY_CELL, Comparison, ReportRow, compare
from vitmnist.report.plots import draw_chart
from vitmnist.report.statistics import format_spread
from vitmnist.report.summary import format_mean, summarize_comparison
from vitmnist.runtime.files import encode_csv, write_atomic
from vitmnist.timing.table import Spread, format_seconds
from vitmnist.tracking.result import TEST_ACC
from vitmnist.tracking.runs import find_runs, read_run

Table = list[dict[str, str]]
"""The cells of each row by the titles of their columns."""

CHART_FILE = "report.png"
FACTS = "machine, software and data"
LEGEND = """
An epoch is a training pass and the evaluation after it; a run counts with the median of its epochs since it was last
started or resumed, without the first of them. × fastest: geometric mean of the ratios to the row with the lowest
median, over the rounds that both have, with 95% intervals that hold for all pairs at once; a difference lies outside
0.99 to 1.01. Waiting: time without a batch, as a share of the training pass. Quality: after the best epoch if there is
a validation split, else after the last one; median over the seeds or folds, with mean ± standard deviation. Memory:
peak resident memory (host), peak tensor memory (GPU).
"""


def write_report(folders: Iterable[Path], output: Path) -> list[Comparison]:
    """Write the report on all runs in or below some folders, and return its comparisons.

    Raises:
        DataError: a folder does not exist or contains no runs.
        OSError: the files cannot be written.
    """
    comparisons = compare([read_run(folder) for folder in find_runs(folders)])
    chart = draw_chart(comparisons)
    text, table = format_markdown(comparisons, has_chart=chart is not None), format_csv(comparisons)
    output.mkdir(parents=True, exist_ok=True)
    if chart:
        write_atomic(output / CHART_FILE, chart)
    for suffix, content in {"csv": table, "md": text, "html": format_html(text, chart)}.items():
        write_atomic(output / f"report.{suffix}", content.encode(errors="backslashreplace"))
    return comparisons


def format_markdown(comparisons: Sequence[Comparison], has_chart: bool = False) -> str:
    """Format the report as Markdown, with a link to the chart in the same folder."""
    parts = ["# Report", f"![Seconds per epoch]({CHART_FILE})"] if has_chart else ["# Report"]
    for comparison, paragraphs, rows in _sections(comparisons):
        parts += [*map(_escape, paragraphs), _format_table(rows, _escape, "github")]
        if comparison.facts:
            facts = [{FACTS: title, "": text} for title, text in comparison.facts.items()]
            facts_table = _format_table(facts, _escape, "github")
            parts.append(f'<details markdown="1"><summary>{FACTS}</summary>\n\n{facts_table}\n\n</details>')
    return "\n\n".join([*parts, LEGEND.lstrip()])


def format_html(text: str, chart: bytes | None) -> str:
    """Convert the Markdown report to a page with the chart in it."""
    body = markdown(text, extensions=["tables", "md_in_html"], output_format="html")
    # Wide tables scroll within their own box. `tabindex` lets the keyboard reach it.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    if chart:
        body = body.replace(f'src="{CHART_FILE}"', f'src="data:image/png;base64,{b64encode(chart).decode()}"', 1)
    return files("vitmnist.report").joinpath("page.html").read_text(encoding="utf-8").replace("BODY", body)


def format_text(comparisons: Sequence[Comparison]) -> str:
    """Format the report for a terminal, without the facts about machine and software."""
    parts: list[str] = []
    for _, paragraphs, rows in _sections(comparisons):
        parts += [*map(_one_line, paragraphs), _format_table(rows, _one_line, "simple")]
    return "\n\n".join(parts)


def _sections(comparisons: Sequence[Comparison]) -> Iterator[tuple[Comparison, list[str], Table]]:
    for index, comparison in enumerate(comparisons, 1):
        heading = [f"## {index}. {comparison.machine_and_data}"] if len(comparisons) > 1 else []
        yield comparison, [*heading, *summarize_comparison(comparison)], build_table(comparison)


def build_table(comparison: Comparison) -> Table:
    """Return a row for each configuration, in the order of the chart, without columns that have no value.

    The status is left out too if all runs completed.
    """
    rows = [_cells(comparison, row) for row in comparison.sorted_rows]
    titles = [title for title in rows[0] if {row[title] for row in rows} - {EMPTY_CELL, "completed"}]
    return [{title: row[title] for title in titles} for row in rows]


def _cells(comparison: Comparison, row: ReportRow) -> dict[str, str]:
    metric = comparison.metric
    cells = {column: format_value(row.values.get(column, EMPTY_CELL)) for column in comparison.columns}
    cells[metric.column or metric.name] = _format_median(row.spreads[metric.name], metric.digits)
    cells["over seeds"] = EMPTY_CELL
    if len(values := row.quality_by_seed(metric.name).values()) > 1:
        cells["over seeds"] = f"{format_mean(metric, values).replace('%', '')}, n={len(values)}"
    cells["test accuracy, %"] = _format_median(row.spreads[TEST_ACC], digits=2)
    for name, column in build_epoch_table().items():
        if column.column:
            cells.setdefault(column.column, _format_median(row.spreads[name], column.digits))
        if name == EPOCH_S.name:
            cells["spread"] = format_spread(row.epoch_s) if row.epoch_s and row.epoch_s.n > 1 else EMPTY_CELL
            cells["× fastest"] = str(comparison.ratio(row) or EMPTY_CELL)
    cells["status"] = row.status
    return cells


def _format_median(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return EMPTY_CELL
    return format_seconds(spread.median) if digits is None else f"{spread.median:,.{digits}f}"


def format_csv(comparisons: Sequence[Comparison]) -> str:
    """Format all rows of all comparisons without rounding."""
    columns = dict.fromkeys(column for comparison in comparisons for column in comparison.columns)
    rows = []
    for index, comparison in enumerate(comparisons, 1):
        for row in comparison.rows:
            cells: dict[str, object] = {"comparison": index, "machine": comparison.machine_and_data}
            cells |= {**columns, **row.values, "runs": len(row.runs), "runs_timed": sum(map(len, row.rounds.values()))}
            ratio = comparison.ratio(row)
            cells["ratio_to_fastest"] = ratio and ratio.mean
            cells["ratio_low"] = ratio and ratio.low
            cells["ratio_high"] = ratio and ratio.high
            for name, spread in row.spreads.items():
                cells[name] = spread and spread.median
                cells[f"{name}_low"] = spread and spread.low
                cells[f"{name}_high"] = spread and spread.high
            cells["status"] = row.status
            rows.append(cells)
    return encode_csv(list(rows[0]), rows)


def _format_table(rows: Table, clean: Callable[[str], str], table_format: str) -> str:
    cleaned = [{clean(title): clean(cell) for title, cell in row.items()} for row in rows]
    return str(tabulate(cleaned, headers="keys", tablefmt=table_format, disable_numparse=True))


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


def _escape(text: str) -> str:
    """Escape what Markdown and HTML would interpret. An underscore within a word, as in gpu_slice, is not markup."""
    special = r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, r"\\\g<0>", html.escape(_one_line(text), quote=False))
