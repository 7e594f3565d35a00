"""Writes a report as `report.md`, `report.html`, `report.csv` and `report.png`, and as text for a terminal."""

import html
import os
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any
from urllib.parse import quote

from markdown import markdown
from tabulate import tabulate

from vitmnist.config import parse_key
from vitmnist.errors import escape_unprintable
from vitmnist.metrics.epoch_table import EPOCH_S, EpochMetric
from vitmnist.report.comparison import EMPTY_CELL, Comparison, compare, round_floats
from vitmnist.report.plots import draw_panels, join_panels
from vitmnist.report.statistics import format_range
from vitmnist.report.summary import describe_ratio, format_mean, summarize_comparison
from vitmnist.runtime.files import UnreadableError, display_path, encode_csv, read_json_or_yaml, write_atomic
from vitmnist.timing.table import Spread, format_seconds
from vitmnist.tracking.result import RunMetric, list_main_test_metrics
from vitmnist.tracking.runs import Run, build_run_table, find_runs, read_run

PAGE, LEGEND = (files("vitmnist.report").joinpath(name) for name in ("page.html", "legend.md"))
"""The template of the page, and the text that explains a report."""
MARK = "†"
"""The mark of a quality that the seeds do not separate from the best one."""
RUN = "its best run"
"""The title of the column for the folder of a row's best run, relative to the report."""


@dataclass(frozen=True)
class Style:
    """How a report is formatted for Markdown or a terminal."""

    clean: Callable[[str], str]  # Escapes a text.
    link: Callable[[str], str]  # Formats the relative folder of a run.
    table_format: str  # Of tabulate


@dataclass(frozen=True)
class Section:
    """The texts about a comparison."""

    about: str  # The date, the machine and the data
    sentences: list[str]
    table: str
    other_metrics: str  # The table that is folded


def write_report(folders: Sequence[Path], output: Path) -> str:
    """Write the report on all runs in or below some folders, and return a short form for a terminal.

    Raises:
        DataError: a folder does not exist or contains no runs.
        OSError: the files cannot be written.
    """
    comparisons = compare([read_run(folder) for folder in find_runs(folders)])
    names = ["report.png", *(f"report-{number}.png" for number in range(2, len(comparisons) + 1))]
    charts = {name: draw_panels(comparison) for name, comparison in zip(names, comparisons, strict=True)}
    text = format_markdown(folders, comparisons, output, charts)
    output.mkdir(parents=True, exist_ok=True)
    for name, panels in charts.items():
        if panels:
            write_atomic(output / name, join_panels(panels.values()))
    contents = {"csv": format_csv(comparisons, output), "md": text, "html": format_html(text, charts)}
    for suffix, content in contents.items():
        write_atomic(output / f"report.{suffix}", content.encode(errors="backslashreplace"))
    sections = [_format_section(comparison, output, TERMINAL) for comparison in comparisons]
    return "\n\n".join(part for section in sections for part in (section.about, *section.sentences, section.table))


def format_markdown(
    folders: Sequence[Path], comparisons: Sequence[Comparison], output: Path, charts: Mapping[str, Mapping[str, bytes]]
) -> str:
    """Format the report as Markdown, with links to the chart of each comparison and to the runs."""
    parts = [f"# Report on {_escape(', '.join(map(display_path, folders)))}"]
    parts.append(f"<small><code>{_escape(_find_command(folders, comparisons))}</code></small>")
    for comparison, (chart, panels) in zip(comparisons, charts.items(), strict=True):
        section = _format_section(comparison, output, MARKDOWN)
        title = f"## {section.about}" if len(comparisons) > 1 else f"<small>{section.about}</small>"
        image = [f"![Panels]({chart})"] if panels else []
        parts += [title, *section.sentences, *image, section.table]
        facts = [{"fact": title, "value": text} for title, text in comparison.facts.items()]
        folded = {"Other metrics": section.other_metrics, "Machine, software and data": _format_table(facts, MARKDOWN)}
        for title, content in folded.items():
            if content:
                parts.append(f'<details markdown="1"><summary>{title}</summary>\n\n{content}\n\n</details>')
    return "\n\n".join([*parts, LEGEND.read_text(encoding="utf-8")])


def _format_section(comparison: Comparison, output: Path, style: Style) -> Section:
    sentences = [*map(style.clean, summarize_comparison(comparison))]
    if comparison.quality_by_seed:
        best = next(row for row in comparison.sorted_rows if row.quality_by_seed(comparison.metric.name))
        name = "Its best run" if comparison.quality_differs else "Best run"
        sentences[0] += f" {name}: {style.link(_relative_folder(comparison.best_run(best), output))}"
    ended_at = max(run.result.ended_at or 0.0 for run in comparison.runs)
    about = f"{datetime.fromtimestamp(ended_at):%Y-%m-%d %H:%M}, {style.clean(comparison.machine_and_data)}"
    tables = build_table(comparison, output), build_table(comparison, output, other_metrics=True)
    table, other_metrics = (_format_table(rows, style) for rows in tables)
    if _find_marked_settings(comparison):
        table += f"\n\n{MARK} the seeds do not separate it from the best"
    return Section(about, sentences, table, other_metrics)


def _find_command(folders: Sequence[Path], comparisons: Sequence[Comparison]) -> str:
    """Return the command of a sweep or a search, from its records, or else the command that writes the report."""
    if len(folders) == 1:
        with suppress(FileNotFoundError, UnreadableError, LookupError, TypeError, AttributeError):
            record: Any = read_json_or_yaml(folders[0] / "multirun.yaml")
            typed = record["hydra"]["overrides"]["task"]
            # A sweep adds the numbers of its rounds to what was typed.
            return shlex.join(["python", "train.py", "-m", *(text for text in typed if parse_key(text) != "repeat")])
        # Optuna's sweeper leaves no `multirun.yaml`. It adds the values of a trial to what was typed.
        first, *others = (run.result.overrides for comparison in comparisons for run in comparison.runs)
        shared = [text for text in first if all(text in overrides for overrides in others)]
        if any(text.startswith("hparams_search=") for text in shared):
            return shlex.join(["python", "train.py", *shared])
    return shlex.join(["vitmnist", "report", *map(display_path, folders)])


def _link(path: str) -> str:
    """Link to the folder of a run by its name; a run outside of the report's folder also has the name of its parent."""
    name = round_floats("/".join(path.split("/")[-2:]))
    return f"[{_escape(name)}]({quote(path)})"


def format_html(text: str, charts: Mapping[str, Mapping[str, bytes]]) -> str:
    """Convert the Markdown report to a page with the panels in it."""
    body = markdown(text, extensions=["tables", "md_in_html"], output_format="html")
    # Wide tables scroll within their own box. `tabindex` lets the keyboard reach it.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    for chart, panels in charts.items():
        sources = {title: f"data:image/png;base64,{b64encode(png).decode()}" for title, png in panels.items()}
        images = "".join(f'<img alt="{html.escape(title)}" src="{source}">' for title, source in sources.items())
        body = body.replace(f'<p><img alt="Panels" src="{chart}"></p>', f'<div class="panels">{images}</div>', 1)
    title = body[body.index("<h1>") + len("<h1>") : body.index("</h1>")]
    return Template(PAGE.read_text(encoding="utf-8")).substitute(title=title, body=body)


def _relative_folder(run: Run, output: Path) -> str:
    """Return the path of a run's folder from the report; `../NAME` if the report is in it."""
    relative = Path(os.path.relpath(run.folder, output))
    return (relative if relative.name else Path("..", run.folder.resolve().name)).as_posix()


def build_table(comparison: Comparison, output: Path, other_metrics: bool = False) -> list[dict[str, str]]:
    """Return a row for each configuration, in the order of the panels, without columns that have no value.

    The status is left out too if all runs completed. `other_metrics`: the metrics that are folded in the report.
    """
    rows = comparison.sorted_rows
    test_metrics = [metric for metric in list_main_test_metrics(comparison.metric) if metric.column]
    main_metrics: list[EpochMetric | RunMetric] = [comparison.metric, *test_metrics, EPOCH_S]
    columns: dict[str, list[str]] = {}
    for column in comparison.columns:
        values = [row.values.get(column, EMPTY_CELL) for row in rows]
        columns[rows[0].names[column]] = [round_floats(str(value)) for value in values]
    if other_metrics:
        # Quality stands before times.
        for metric in sorted(build_run_table().values(), key=lambda metric: not metric.depends_on_weights):
            if metric.column and metric.name not in [main_metric.name for main_metric in main_metrics]:
                columns.setdefault(comparison.title(metric), _format_metric(comparison, metric))
        times = [row.epoch_s for row in rows]
        columns["range of epoch, s"] = [format_range(time) if time and time.n > 1 else EMPTY_CELL for time in times]
    else:
        for metric in main_metrics:
            # Metrics of epochs that are evaluated on the test split have its titles; their runs have no others.
            columns.setdefault(comparison.title(metric), _format_metric(comparison, metric))
        columns["× fastest"] = [describe_ratio(comparison, row) or EMPTY_CELL for row in rows]
        columns[RUN] = [_relative_folder(comparison.best_run(row), output) for row in rows]
        columns["status"] = [row.status for row in rows]
    shown = {title: cells for title, cells in columns.items() if {*cells} - {EMPTY_CELL, "completed"}}
    return [dict(zip(shown, cells, strict=True)) for cells in zip(*shown.values(), strict=True)]


def _find_marked_settings(comparison: Comparison) -> list[str]:
    """Return the settings to mark as within noise of the best one; none if all are, as the sentence says."""
    return comparison.within_noise if len(comparison.within_noise) < len(comparison.leads_by_setting) else []


def _format_metric(comparison: Comparison, metric: EpochMetric | RunMetric) -> list[str]:
    """Format a metric of each row, with a mark at the quality of settings within noise of the best."""
    rows = comparison.sorted_rows
    if metric.depends_on_weights:
        by_row = [row.quality_by_seed(metric.name).values() for row in rows]
        cells = [format_mean(metric, values).replace("%", "") if values else EMPTY_CELL for values in by_row]
        marked = _find_marked_settings(comparison) if metric is comparison.metric else []
        marks = [f"{MARK} " if row.label_without_loader in marked else "" for row in rows]
        return [mark + cell for mark, cell in zip(marks, cells, strict=True)]
    spreads = [row.spreads[metric.name] for row in rows]
    style = format_seconds if metric.unit == "s" else metric.format
    return [style(spread.median).replace("%", "") if spread else EMPTY_CELL for spread in spreads]


def format_csv(comparisons: Sequence[Comparison], output: Path) -> str:
    """Format all rows of all comparisons without rounding."""
    columns = dict.fromkeys(column for comparison in comparisons for column in comparison.columns)
    rows = []
    for index, comparison in enumerate(comparisons, 1):
        for row in comparison.rows:
            cells: dict[str, object] = {"comparison": index, "machine": comparison.machine_and_data}
            cells |= {**columns, **row.values, "runs": len(row.runs), "runs_timed": sum(map(len, row.rounds.values()))}
            ratio = comparison.ratio_to_baseline(row)
            cells["ratio_to_fastest"] = ratio and ratio.mean
            cells |= {"ratio_low": ratio and ratio.low, "ratio_high": ratio and ratio.high}
            for name, metric in build_run_table().items():
                values = row.quality_by_seed(name).values() if metric.depends_on_weights else ()
                spread = Spread.of(values) if values else row.spreads.get(name)
                cells[name] = fmean(values) if values else spread and spread.median
                cells |= {f"{name}_low": spread and spread.low, f"{name}_high": spread and spread.high}
            cells |= {"status": row.status, "best_run": _relative_folder(comparison.best_run(row), output)}
            rows.append(cells)
    return encode_csv(list(rows[0]), rows)


def _format_table(rows: list[dict[str, str]], style: Style) -> str:
    """Format a table, with numbers aligned at the right; empty without rows."""
    if not rows:
        return ""
    formats = {title: style.link if title == RUN else style.clean for title in rows[0]}
    cells = [{style.clean(title): format_cell(row[title]) for title, format_cell in formats.items()} for row in rows]
    number = re.compile(rf"({MARK} )?-?\d[\d.,e-]*( ± [\d.]+|×)?|–")
    numeric = [all(number.fullmatch(row[title]) for row in rows) for title in rows[0]]
    align = ["right" if is_numeric else "left" for is_numeric in numeric]
    return str(tabulate(cells, headers="keys", tablefmt=style.table_format, disable_numparse=True, colalign=align))


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


def _escape(text: str) -> str:
    """Escape what Markdown and HTML would interpret. An underscore within a word, as in gpu_slice, is not markup."""
    special = r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, r"\\\g<0>", html.escape(_one_line(text), quote=False))


MARKDOWN = Style(clean=_escape, link=_link, table_format="pipe")
TERMINAL = Style(clean=_one_line, link=_one_line, table_format="simple")
