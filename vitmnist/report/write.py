"""Writes a report as `report.md`, `report.html`, `report.csv` and `report.png`, and as text for a terminal."""

import html
import os
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from markdown import markdown
from tabulate import tabulate

from vitmnist.config.schema import format_value
from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.report.comparison import EMPTY_CELL, Comparison, ReportRow, compare
from vitmnist.report.plots import draw_panels, join_panels
from vitmnist.report.statistics import format_spread
from vitmnist.report.summary import format_mean, summarize_comparison
from vitmnist.runtime.files import UnreadableError, display_path, encode_csv, read_json_or_yaml, write_atomic
from vitmnist.timing.table import Spread, format_seconds
from vitmnist.tracking.result import TEST_ACC
from vitmnist.tracking.runs import Run, find_runs, read_run

Formatter = Callable[[str], str]
"""Formats a text for Markdown or a terminal."""
PAGE, LEGEND = (files("vitmnist.report").joinpath(name) for name in ("page.html", "legend.md"))
"""The template of the page, and the text that explains a report."""
RUN = "best run"
"""The title of the column for the folder of a row's best run, relative to the report."""


def write_report(folders: Sequence[Path], output: Path) -> str:
    """Write the report on all runs in or below some folders, and return it as text for a terminal.

    Raises:
        DataError: a folder does not exist or contains no runs.
        OSError: the files cannot be written.
    """
    comparisons = compare([read_run(folder) for folder in find_runs(folders)])
    charts = {f"report{f'-{n}' if n > 1 else ''}.png": draw_panels(item) for n, item in enumerate(comparisons, 1)}
    text = format_markdown(folders, comparisons, output, charts)
    output.mkdir(parents=True, exist_ok=True)
    for name, panels in charts.items():
        if panels:
            write_atomic(output / name, join_panels(png for png, *_ in panels.values()))
    contents = {"csv": format_csv(comparisons, output), "md": text, "html": format_html(text, charts)}
    for suffix, content in contents.items():
        write_atomic(output / f"report.{suffix}", content.encode(errors="backslashreplace"))
    return format_text(comparisons, output)


def format_markdown(
    folders: Sequence[Path],
    comparisons: Sequence[Comparison],
    output: Path,
    charts: Mapping[str, Mapping[str, list[bytes]]],
) -> str:
    """Format the report as Markdown, with links to the chart of each comparison and to the runs."""
    parts = [f"# Report on {_escape(', '.join(map(display_path, folders)))}"]
    command = f"<small><code>{_escape(_find_command(folders))}</code></small>"
    for comparison, (chart, panels) in zip(comparisons, charts.items(), strict=True):
        heading, *sentences, about, table = _format_section(comparison, output, _escape, _link, "pipe")
        parts += [f"## {heading}"] if len(comparisons) > 1 else []
        parts += [*sentences, command, f"<small>{about}</small>", *([f"![Panels]({chart})"] if panels else []), table]
        if comparison.facts:
            facts = [{"fact": title, "value": text} for title, text in comparison.facts.items()]
            table = _format_table(facts, _escape, _link, "pipe")
            title = "<summary>Machine, software and data</summary>"
            parts.append(f'<details markdown="1">{title}\n\n{table}\n\n</details>')
    return "\n\n".join([*parts, LEGEND.read_text(encoding="utf-8")])


def format_text(comparisons: Sequence[Comparison], output: Path) -> str:
    """Format the report for a terminal, without the facts about machine and software."""
    sections = [_format_section(comparison, output, _one_line, _one_line, "simple") for comparison in comparisons]
    return "\n\n".join(part for _, *section in sections for part in section)


def _format_section(
    comparison: Comparison, output: Path, clean: Formatter, link: Formatter, table_format: str
) -> list[str]:
    """Format machine and data, the sentences, the date with machine and data, and the table of a comparison."""
    first, *others = map(clean, summarize_comparison(comparison))
    if comparison.quality_by_seed:
        best_run = comparison.best_run(comparison.sorted_rows[0])
        first += f" Best run: {link(_relative_folder(best_run, output))}"
    ends = [run.result.ended_at or 0.0 for row in comparison.rows for run in row.runs]
    machine = clean(comparison.machine_and_data)
    about = f"{datetime.fromtimestamp(max(ends)):%Y-%m-%d %H:%M}, {machine}"
    table = _format_table(build_table(comparison, output), clean, link, table_format)
    return [machine, first, *others, about, table]


def _find_command(folders: Sequence[Path]) -> str:
    """Return the command of a sweep, from Hydra's record, or else the command that writes the report."""
    if len(folders) == 1:
        with suppress(FileNotFoundError, UnreadableError, LookupError, TypeError):
            record: Any = read_json_or_yaml(folders[0] / "multirun.yaml")
            overrides = record["hydra"]["overrides"]["task"]
            # A sweep adds the numbers of its rounds to what was typed.
            return shlex.join(["python", "train.py", "-m", *(text for text in overrides if text[:7] != "repeat=")])
    return shlex.join(["vitmnist", "report", *map(display_path, folders)])


def _link(path: str) -> str:
    return f"[{_escape(path)}]({quote(path)})"


def format_html(text: str, charts: Mapping[str, Mapping[str, list[bytes]]]) -> str:
    """Convert the Markdown report to a page with the panels in it."""
    body = markdown(text, extensions=["tables", "md_in_html"], output_format="html")
    # Wide tables scroll within their own box. `tabindex` lets the keyboard reach it.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    for chart, panels in charts.items():
        images = "".join(_format_panel(title, *pngs) for title, pngs in panels.items())
        body = body.replace(f'<p><img alt="Panels" src="{chart}"></p>', f'<div class="panels">{images}</div>', 1)
    title = body[body.index("<h1>") + len("<h1>") : body.index("</h1>")]
    return Template(PAGE.read_text(encoding="utf-8")).substitute(title=title, body=body)


def _format_panel(title: str, *pngs: bytes) -> str:
    """Format a panel as a picture; where two panels are side by side, its wide version if it has any."""
    image, *wide = (f"data:image/png;base64,{b64encode(png).decode()}" for png in pngs)
    sources = "".join(f'<source media="(700px <= width < 1100px)" srcset="{source}">' for source in wide)
    return f'<picture>{sources}<img alt="{html.escape(title)}" src="{image}"></picture>'


def _relative_folder(run: Run, output: Path) -> str:
    """Return the path of a run's folder from the report; `../NAME` if the report is in it."""
    relative = Path(os.path.relpath(run.folder, output))
    return (relative if relative.name else Path("..", run.folder.resolve().name)).as_posix()


def build_table(comparison: Comparison, output: Path) -> list[dict[str, str]]:
    """Return a row for each configuration, in the order of the panels, without columns that have no value.

    The status is left out too if all runs completed.
    """
    rows = [_cells(comparison, row, output) for row in comparison.sorted_rows]
    titles = [title for title in rows[0] if {row[title] for row in rows} - {EMPTY_CELL, "completed"}]
    return [{title: row[title] for title in titles} for row in rows]


def _cells(comparison: Comparison, row: ReportRow, output: Path) -> dict[str, str]:
    metric, table = comparison.metric, build_epoch_table()
    cells = {row.names[column]: format_value(row.values.get(column, EMPTY_CELL)) for column in comparison.columns}
    cells[comparison.title(metric)] = _format_median(row.spreads[metric.name], metric.digits)
    values = row.quality_by_seed(metric.name).values()
    over_seeds = f"{format_mean(metric, values).replace('%', '')}, n={len(values)}" if len(values) > 1 else EMPTY_CELL
    cells["over seeds"] = over_seeds
    if comparison.eval_split != "test":
        cells["test accuracy, %"] = _format_median(row.spreads[TEST_ACC], digits=2)
    cells["epoch, s"] = _format_median(row.epoch_s)
    is_repeated = row.epoch_s and row.epoch_s.n > 1
    cells["range"] = format_spread(row.epoch_s).removeprefix("range ") if row.epoch_s and is_repeated else EMPTY_CELL
    cells |= {"× fastest": str(comparison.ratio(row) or EMPTY_CELL), "status": row.status}
    # Quality stands before times.
    for column in sorted(table.values(), key=lambda column: column.summary != "selected"):
        if column.column:
            cells.setdefault(comparison.title(column), _format_median(row.spreads[column.name], column.digits))
    return cells | {RUN: _relative_folder(comparison.best_run(row), output)}


def _format_median(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return EMPTY_CELL
    return format_seconds(spread.median) if digits is None else f"{spread.median:,.{digits}f}"


def format_csv(comparisons: Sequence[Comparison], output: Path) -> str:
    """Format all rows of all comparisons without rounding."""
    columns = dict.fromkeys(column for comparison in comparisons for column in comparison.columns)
    rows = []
    for index, comparison in enumerate(comparisons, 1):
        for row in comparison.rows:
            cells: dict[str, object] = {"comparison": index, "machine": comparison.machine_and_data}
            cells |= {**columns, **row.values, "runs": len(row.runs), "runs_timed": sum(map(len, row.rounds.values()))}
            ratio = comparison.ratio(row)
            ratios = (ratio.mean, ratio.low, ratio.high) if ratio else (None,) * 3
            cells |= zip(("ratio_to_fastest", "ratio_low", "ratio_high"), ratios, strict=True)
            for name, spread in row.spreads.items():
                cells[name] = spread and spread.median
                cells[f"{name}_low"] = spread and spread.low
                cells[f"{name}_high"] = spread and spread.high
            cells |= {"status": row.status, "best_run": _relative_folder(comparison.best_run(row), output)}
            rows.append(cells)
    return encode_csv(list(rows[0]), rows)


def _format_table(rows: list[dict[str, str]], clean: Formatter, link: Formatter, table_format: str) -> str:
    """Format a table, with numbers aligned at the right."""
    cells = [{clean(title): (link if title == RUN else clean)(cell) for title, cell in row.items()} for row in rows]
    numeric = [all(re.fullmatch(r"-?\d[\d.,e-]*|–", row[title]) for row in rows) for title in rows[0]]
    align = ["right" if is_numeric else "left" for is_numeric in numeric]
    return str(tabulate(cells, headers="keys", tablefmt=table_format, disable_numparse=True, colalign=align))


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


def _escape(text: str) -> str:
    """Escape what Markdown and HTML would interpret. An underscore within a word, as in gpu_slice, is not markup."""
    special = r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, r"\\\g<0>", html.escape(_one_line(text), quote=False))
