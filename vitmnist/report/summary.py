"""Summarises a comparison in a few sentences: which configuration is best, which loader is fastest; losses.

A difference is stated only where its interval excludes equality. Each sentence is a pure function of the comparison,
but for the best trial of a search, and spells out the overrides of one configuration at most: the table has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from vitmnist.metrics.epoch_table import Metric
from vitmnist.report.comparison import Comparison, Configuration, loader_groups
from vitmnist.report.statistics import MIN_ROUNDS, Differences, seconds
from vitmnist.tracking.epoch_record import EpochRecord
from vitmnist.tracking.result import search_summary


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    sweeps = dict.fromkeys(run.folder.parent for row in comparison.rows for run in row.runs)
    searches = [sentence for folder in sweeps if (sentence := search_summary(folder))]
    # A search does not repeat a trial with other seeds.
    sentences = [*(searches or [best_quality(comparison)]), *fastest(comparison), losses(comparison)]
    return [sentence for sentence in sentences if sentence]


def quality_title(metric: Metric) -> str:
    """`accuracy`: a metric without its unit; by its name if it has no column."""
    return (metric.column or metric.name).partition(",")[0]


def quality_text(metric: Metric, value: float) -> str:
    """`97.10%` or `0.1234`."""
    return f"{value:.{4 if metric.digits is None else metric.digits}f}{'%' * (metric.unit == '%')}"


def best_quality(comparison: Comparison) -> str:
    """Which configuration is the best by the monitored metric, and whether that is more than noise over the seeds."""
    if not comparison.differs:
        return ""
    metric, groups = comparison.metric, comparison.by_quality
    label, values = next(iter(groups.items()))
    low, high = (quality_text(metric, bound(values.values())) for bound in (min, max))
    over = f" ({low} to {high} over {len(values)} seeds)" if len(values) > 1 else ""
    best = f"Best {quality_title(metric)}: {label}, {quality_text(metric, median(values.values()))}{over}."
    gains = {name: {seed: metric.sign * value for seed, value in groups[name].items()} for name in groups}
    differences = Differences(gains)
    leads = [differences.get(label, other) for other in groups if other != label]
    # A lead without any variance over the seeds, as of a few images, which change together, says nothing about noise.
    has_noise = [lead for lead in leads if lead and (lead.low != lead.high or lead.mean == 0)]
    bounds = [lead.low for lead in has_noise if lead.low is not None]
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
        return [f"{ranked[0].label} took {_time(ranked[0])}".removeprefix(" took ")]
    groups = {shared: rows for shared, rows in loader_groups(ranked).items() if len(rows) > 1}
    answers = [_answer(comparison, rows, "loader", f" at {shared}" * bool(shared)) for shared, rows in groups.items()]
    return answers or [_answer(comparison, ranked, "configuration")]


def _answer(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str = "") -> str:
    """Whether a choice matters, the row with the lowest median, and how the others compare with it."""
    best, *others = rows
    ratios = {row: ratio for row in others if (ratio := comparison.ratio(row, best))}
    verdict = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    if any(ratio.is_difference for ratio in ratios.values()):
        verdict = f"The {noun} matters{where}"
    elif len(ratios) == len(others) and all(ratio.low is not None for ratio in ratios.values()):
        verdict = f"All {noun}s are within noise{where}"
    is_fastest = len(ratios) == len(others) and all(ratio.is_difference and ratio.mean > 1 for ratio in ratios.values())
    name, relative = best.loader, ", ".join(f"{row.loader} {ratio}" for row, ratio in ratios.items())
    if noun == "configuration":
        extremes = sorted(ratios.values(), key=lambda ratio: ratio.mean)
        name, relative = best.label, " to ".join(map(str, dict.fromkeys([*extremes[:1], *extremes[-1:]])))
    answer = f"{verdict}: {name} {'is the fastest' if is_fastest else 'has the lowest median'}, {_time(best)}"
    return f"{answer} Relative to it: {relative}." if relative else answer


def _time(row: Configuration) -> str:
    return f"{seconds(row.epoch_s.median)} s per epoch ({row.epoch_s})." if row.epoch_s else ""


def losses(comparison: Comparison) -> str:
    """Whether runs that differ only in loader or round have equal losses, as promised; if not, where they differ."""
    loaders: set[str] = set()
    for shared, rows in loader_groups(comparison.rows).items():
        for seeds in dict.fromkeys(run.seeds for row in rows for run in row.runs):
            runs = [(row, run.epochs) for row in rows for run in row.runs if run.seeds == seeds and run.epochs]
            runs.sort(key=lambda pair: -len(pair[1]))
            for row, epochs in runs[1:]:
                longest, reference = runs[0]
                if epoch := _first_difference(reference, epochs):
                    names = " and ".join(dict.fromkeys([longest.loader or "repeats", row.loader or "repeats"]))
                    where = f"{seeds} {shared}".rstrip()
                    return f"The losses of {names} differ from epoch {epoch} on, with {where}."
                loaders |= {longest.loader, row.loader} if row is not longest else set()
    names = ", ".join(sorted(loaders))
    equal = "Equal training and evaluation losses, epoch for epoch and to the last bit, with the same seed"
    return f"{equal}: {names}." if names else ""


def _first_difference(epochs: Sequence[EpochRecord], others: Sequence[EpochRecord]) -> int:
    """The first epoch, counted from 1, whose losses differ; 0 if there is none."""
    for epoch, pair in enumerate(zip(epochs, others, strict=False), 1):
        first, second = ([record.get(name) for name in ("train_loss", "eval_loss")] for record in pair)
        if first != second:
            return epoch
    return 0
