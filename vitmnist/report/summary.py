"""Summarises a comparison in a few sentences: which configuration is best, and which loader is the fastest.

A difference is stated only where its interval excludes equality. A sentence spells out the overrides of one
configuration at most: the table has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from vitmnist.metrics.epoch_table import Metric
from vitmnist.report.comparison import Comparison, Configuration, loader_groups
from vitmnist.report.statistics import MIN_ROUNDS, Differences, format_seconds, format_spread
from vitmnist.tracking.result import search_summary


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
    bounds = [lead.low for lead in leads if lead and lead.low is not None]
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
        return ["No run can be ranked: a run must be completed, alone on the machine, and have a second epoch."]
    if len(ranked) == 1:
        (row,) = ranked
        return [f"{row.label} took {_time(row)}" if row.label else _time(row)]
    answers = []
    for shared, rows in loader_groups(ranked).items():
        if len(rows) > 1:
            best = rows[0]
            answer = _answer(comparison, rows, "loader", f" at {shared}" if shared else "", best.loader)
            ratios = {row.loader: comparison.ratio(row, best) for row in rows[1:]}
            relative = [f"{loader} {ratio}" for loader, ratio in ratios.items() if ratio]
            answers.append(f"{answer} Relative to it: {', '.join(relative)}." if relative else answer)
    return answers or [_answer(comparison, ranked, "configuration", "", ranked[0].label)]


def _answer(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str, name: str) -> str:
    """Whether a choice matters, and the row with the lowest median.

    Args:
        rows: the rows to compare, lowest median first.
        noun: what is chosen.
        name: the choice of the first row.
    """
    best, *others = rows
    ratios = [comparison.ratio(row, best) for row in others]
    verdict = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    if any(ratio and ratio.is_difference for ratio in ratios):
        verdict = f"The {noun} matters{where}"
    elif all(ratio and ratio.low is not None for ratio in ratios):
        verdict = f"All {noun}s are within noise{where}"
    is_fastest = all(ratio and ratio.is_difference and ratio.mean > 1 for ratio in ratios)
    return f"{verdict}: {name} {'is the fastest' if is_fastest else 'has the lowest median'}, {_time(best)}"


def _time(row: Configuration) -> str:
    return f"{format_seconds(row.epoch_s.median)} s per epoch ({format_spread(row.epoch_s)})." if row.epoch_s else ""
