"""Writes a report as `report.md`, `report.html`, `report.csv` and `report.png`, and as text for a terminal.

It begins with a few sentences: which configuration is best, and which loader is the fastest. A difference is stated
only where its interval excludes equality. A sentence spells out the overrides of one configuration at most: the table
has the others.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median

from markdown import markdown
from tabulate import tabulate

from vitmnist.config.schema import value_text
from vitmnist.errors import printable
from vitmnist.metrics.epoch_table import EPOCH_S, Metric, epoch_metrics
from vitmnist.report.comparison import EMPTY_CELL, Comparison, Configuration, compare, loader_groups
from vitmnist.report.plots import draw
from vitmnist.report.statistics import MIN_ROUNDS, Differences, format_seconds, format_spread
from vitmnist.runtime.files import csv_text, write_atomic
from vitmnist.timing.table import Spread
from vitmnist.tracking.result import TEST_ACC, find_runs, read_run, search_summary

Table = list[dict[str, str]]
"""The cells of each row by the titles of their columns."""

FACTS = "machine, software and data"
"""The title of the table that is folded in Markdown and on the page."""
CHART = "report.png"
LEGEND = """
An epoch is a training pass and the evaluation after it; a run counts with the median of its epochs since it was last
started or resumed, without the first of them. × fastest: geometric mean of the ratios to the row with the lowest
median, over the rounds that both have, with 95% intervals that hold for all pairs at once (paired t-tests over the
rounds, pooled variance, Bonferroni); a difference lies outside 0.99 to 1.01. Waiting: time without a batch, as a share
of the training pass. Accuracy, F1 and other quality: after the best epoch if there is a validation split, else after
the last one; median over the seeds. Memory: peak resident memory (host), peak tensor memory (GPU).
"""


def write_report(folders: Iterable[Path], output: Path) -> list[Comparison]:
    """Write the report on all runs in or below some folders, and return its comparisons.

    Raises:
        DataError: a folder does not exist, or contains no runs.
        OSError: the files cannot be written.
    """
    comparisons = compare([read_run(folder) for folder in find_runs(folders)])
    output.mkdir(parents=True, exist_ok=True)
    text, png = as_markdown(comparisons), draw(comparisons)
    write_atomic(output / CHART, png)
    for suffix, content in {"csv": as_csv(comparisons), "md": text, "html": as_html(text, png)}.items():
        write_atomic(output / f"report.{suffix}", content.encode(errors="backslashreplace"))
    return comparisons


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """The report as Markdown; its chart is `report.png` in the same folder."""
    blocks: list[str] = []
    for comparison, paragraphs, rows in _blocks(comparisons):
        blocks += [*map(_escape, paragraphs), _tabulated(rows, _escape, "github")]
        if comparison.facts:
            facts = [{FACTS: title, "": text} for title, text in comparison.facts.items()]
            facts_table = _tabulated(facts, _escape, "github")
            blocks.append(f'<details markdown="1"><summary>{FACTS}</summary>\n\n{facts_table}\n\n</details>')
    return "\n\n".join(["# Report", f"![Seconds per epoch]({CHART})", *blocks, LEGEND.lstrip()])


def as_html(text: str, png: bytes) -> str:
    """The Markdown report as a page that needs no other file, with the chart in it."""
    body = markdown(text, extensions=["tables", "md_in_html"], output_format="html")
    # Wide tables scroll within their own box, which the keyboard can reach.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    body = body.replace(f'src="{CHART}"', f'src="data:image/png;base64,{b64encode(png).decode()}"', 1)
    return files("vitmnist.report").joinpath("page.html").read_text(encoding="utf-8").replace("BODY", body)


def as_text(comparisons: Sequence[Comparison]) -> str:
    """The report for a terminal, without the facts about machine and software."""
    blocks: list[str] = []
    for _, paragraphs, rows in _blocks(comparisons):
        blocks += [*map(_line, paragraphs), _tabulated(rows, _line, "simple")]
    return "\n\n".join(blocks)


def _blocks(comparisons: Sequence[Comparison]) -> Iterator[tuple[Comparison, list[str], Table]]:
    """Each comparison, its heading if there are several, the sentences about it, and its table."""
    for index, comparison in enumerate(comparisons, 1):
        heading = [f"## {index}. {comparison.machine_and_data}"] if len(comparisons) > 1 else []
        yield comparison, [*heading, *summary(comparison)], table(comparison)


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    sweeps = dict.fromkeys(run.folder.parent for row in comparison.rows for run in row.runs)
    searches = [sentence for folder in sweeps if (sentence := search_summary(folder))]
    # A search does not repeat a trial with other seeds.
    sentences = [*(searches or [best_quality(comparison)]), *fastest(comparison)]
    return [sentence for sentence in sentences if sentence]


def quality_text(metric: Metric, value: float) -> str:
    """`97.10%` or `0.1234`."""
    digits = 4 if metric.digits is None else metric.digits
    return f"{value:.{digits}f}" + ("%" if metric.unit == "%" else "")


def best_quality(comparison: Comparison) -> str:
    """Which configuration is the best by the monitored metric, and whether that is more than noise over the seeds."""
    if not comparison.differs:
        return ""
    metric = comparison.metric
    groups = comparison.by_quality
    label, values = next(iter(groups.items()))
    low, high = (quality_text(metric, bound(values.values())) for bound in (min, max))
    over = f" ({low} to {high} over {len(values)} seeds)" if len(values) > 1 else ""
    title = (metric.column or metric.name).removesuffix(", %")
    best = f"Best {title}: {label}, {quality_text(metric, median(values.values()))}{over}."
    gains = {name: {seed: metric.sign * value for seed, value in groups[name].items()} for name in groups}
    differences = Differences(gains)
    leads = [differences.get(label, other) for other in groups if other != label]
    # A lead that is the same with every seed, as of a few images that change together, says nothing about noise.
    varying = [lead for lead in leads if lead and (lead.low != lead.high or lead.mean == 0)]
    bounds = [lead.low for lead in varying if lead.low is not None]
    if len(bounds) < len(leads):
        seeds = f"{len(values)} seeds" if len(values) > 1 else "One seed"
        return f"{best} {seeds} cannot tell whether that is more than noise; set seed=1,2,3 or more."
    if unsure := sum(bound <= 0 for bound in bounds):
        return f"{best} That may be noise: {unsure} of {len(bounds)} others are within noise of it."
    points = quality_text(metric, min(bounds)).replace("%", " percentage points")
    return f"{best} That is more than noise: by at least {points} (95% interval)."


def fastest(comparison: Comparison) -> list[str]:
    """Which loader is the fastest, and whether it matters, for each combination of the other values that vary.

    If no loaders are compared, the same of the configurations.
    """
    ranked = comparison.ranked
    if not ranked:
        return [
            "No run is ranked: it takes a completed run, alone on the machine, with two epochs since its last start."
        ]
    if len(ranked) == 1:
        (row,) = ranked
        return [f"{row.label} took {_time_text(row)}" if row.label else _time_text(row)]
    answers = []
    for shared, rows in loader_groups(ranked).items():
        if len(rows) > 1:
            best = rows[0]
            answer = _compare_choices(comparison, rows, "loader", f" at {shared}" if shared else "", best.loader)
            ratios = {row.loader: comparison.ratio(row, best) for row in rows[1:]}
            relative = [f"{loader} {ratio}" for loader, ratio in ratios.items() if ratio]
            answers.append(f"{answer} Relative to it: {', '.join(relative)}." if relative else answer)
    return answers or [_compare_choices(comparison, ranked, "configuration", "", ranked[0].label)]


def _compare_choices(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str, name: str) -> str:
    """Whether a choice matters, and the row with the lowest median.

    Args:
        rows: the rows to compare, lowest median first.
        noun: what is chosen.
        name: the choice of the first row.
    """
    best, *others = rows
    ratios = [comparison.ratio(row, best) for row in others]
    verdict = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    if any(ratio and ratio.is_clear for ratio in ratios):
        verdict = f"The {noun} matters{where}"
    elif all(ratio and ratio.low is not None for ratio in ratios):
        verdict = f"All {noun}s are within noise{where}"
    is_fastest = all(ratio and ratio.is_clear and ratio.mean > 1 for ratio in ratios)
    return f"{verdict}: {name} {'is the fastest' if is_fastest else 'has the lowest median'}, {_time_text(best)}"


def _time_text(row: Configuration) -> str:
    return f"{format_seconds(row.epoch_s.median)} s per epoch ({format_spread(row.epoch_s)})." if row.epoch_s else ""


def table(comparison: Comparison) -> Table:
    """A row for each configuration, in the order of the chart, without columns that have no value.

    The status is left out too if all runs completed.
    """
    rows = [_cells(comparison, row) for row in comparison.ordered]
    titles = [title for title in rows[0] if {row[title] for row in rows} - {EMPTY_CELL, "completed"}]
    return [{title: row[title] for title in titles} for row in rows]


def _cells(comparison: Comparison, row: Configuration) -> dict[str, str]:
    """The values of a row, then what was measured: quality, time, and the rest."""
    metric = comparison.metric
    quality = row.quality(metric.name)
    seeds = EMPTY_CELL
    if quality and quality.n > 1:
        low, high = (quality_text(metric, bound).rstrip("%") for bound in (quality.low, quality.high))
        seeds = f"{low}–{high}, n={quality.n}"
    cells = {column: value_text(row.values.get(column, EMPTY_CELL)) for column in comparison.columns}
    cells[metric.column or metric.name] = _median(row.spreads[metric.name], metric.digits)
    cells["over seeds"] = seeds
    cells["test accuracy, %"] = _median(row.spreads[TEST_ACC], digits=2)
    for name, column in epoch_metrics().items():
        if column.column:
            cells.setdefault(column.column, _median(row.spreads[name], column.digits))
        if name == EPOCH_S.name:
            cells["spread"] = format_spread(row.epoch_s) if row.epoch_s and row.epoch_s.n > 1 else EMPTY_CELL
            cells["× fastest"] = str(comparison.ratio(row) or EMPTY_CELL)
    cells["status"] = row.status
    return cells


def _median(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return EMPTY_CELL
    return format_seconds(spread.median) if digits is None else f"{spread.median:,.{digits}f}"


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """All rows of all comparisons, not rounded. An empty cell was not measured."""
    columns = dict.fromkeys(column for comparison in comparisons for column in comparison.columns)
    rows = []
    for index, comparison in enumerate(comparisons, 1):
        for row in comparison.rows:
            cells: dict[str, object] = {"comparison": index, "machine": comparison.machine_and_data}
            cells |= {**columns, **row.values, "runs": len(row.runs), "runs_ranked": sum(map(len, row.rounds.values()))}
            ratio = comparison.ratio(row)
            for column, part in (("ratio_to_fastest", "mean"), ("ratio_low", "low"), ("ratio_high", "high")):
                cells[column] = getattr(ratio, part, None)
            for name, spread in row.spreads.items():
                for column, part in (("", "median"), ("_low", "low"), ("_high", "high")):
                    cells[f"{name}{column}"] = getattr(spread, part, None)
            rows.append(cells | {"status": row.status})
    return csv_text(list(rows[0]), rows)


def _tabulated(rows: Table, clean: Callable[[str], str], table_format: str) -> str:
    cleaned = [{clean(title): clean(cell) for title, cell in row.items()} for row in rows]
    return str(tabulate(cleaned, headers="keys", tablefmt=table_format, disable_numparse=True))


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _escape(text: str) -> str:
    """One line that Markdown and HTML show as it is. An underscore within a word, as in gpu_slice, is not a mark."""
    special = r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, r"\\\g<0>", html.escape(_line(text), quote=False))
