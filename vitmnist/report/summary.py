"""Summarises a comparison in a few sentences: the best quality, the lowest time, and how certain the differences are.

A sentence spells out the overrides of at most one configuration; the table has the others.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median, stdev

from vitmnist.metrics.epoch_table import EpochMetric
from vitmnist.report.comparison import Comparison, ReportRow
from vitmnist.report.statistics import PairwiseComparison, format_spread
from vitmnist.timing.table import Bottleneck, format_seconds
from vitmnist.tracking.bottleneck import advise_on_launches, find_bottleneck, has_graph

NO_TIME = (
    "No times can be compared: that takes completed runs, alone on the machine, with two epochs since their last start."
)
NO_RATIO = "Fewer than three rounds do not show the noise of times; set repeats=3 or more."


def summarize_comparison(comparison: Comparison) -> list[str]:
    """Return the sentences about a comparison, the most important one first."""
    sentences = [summarize_quality(comparison), *summarize_times(comparison), summarize_launches(comparison)]
    return [*map(round_floats, filter(None, sentences))]


def round_floats(text: str) -> str:
    """Round long floats of the configuration to three significant digits; two labels can then be equal."""
    return re.sub(r"\d+\.\d{6,}(e-\d+)?", lambda number: f"{float(number[0]):.3g}", text)


def format_quality(metric: EpochMetric, value: float) -> str:
    digits = 4 if metric.digits is None else metric.digits
    return f"{value:.{digits}f}" + ("%" if metric.unit == "%" else "")


def summarize_quality(comparison: Comparison) -> str:
    """Name the configuration with the best value of the monitored metric, or give the value that all have.

    Empty if no run was completed.
    """
    metric, groups = comparison.metric, comparison.quality_by_seed
    if not groups:
        return ""
    label, values = next(iter(groups.items()))
    title = comparison.title(metric).removesuffix(", %")
    best = format_quality(metric, median(values.values()))
    mean = format_mean(metric, values.values()) if len(values) > 1 else ""
    if not comparison.quality_differs:
        if mean and len(groups) == 1:
            best = f"{mean} (mean ± standard deviation over {_count(values)})"
        return f"{title[0].upper()}{title[1:]}: {best}{' in each configuration' if len(groups) > 1 else ''}."
    extreme = "Highest" if metric.direction == "max" else "Lowest"
    if not mean:
        return f"{extreme} {title}: {label}, {best}. {_quality_noise(comparison, label)}"
    over_seeds = f"mean {mean} over {_count(values)}"
    return f"{extreme} median {title}: {label}, {best} ({over_seeds}). {_quality_noise(comparison, label)}"


def format_mean(metric: EpochMetric, values: Collection[float]) -> str:
    """Format mean and standard deviation of two or more values, such as `97.31% ± 0.42`."""
    return f"{format_quality(metric, fmean(values))} ± {format_quality(metric, stdev(values)).rstrip('%')}"


def _count(values: Mapping[str, float]) -> str:
    """Count the values by seed, as `5 folds` or `3 seeds`."""
    return f"{len(values)} {'folds' if all('data.fold=' in seed for seed in values) else 'seeds'}"


def _quality_noise(comparison: Comparison, best: str) -> str:
    """Say whether the best configuration leads the others by more than the noise over the seeds."""
    metric, groups = comparison.metric, comparison.quality_by_seed
    # A positive gain is an improvement, whatever the direction of the metric.
    gains = {label: {seed: metric.sign * value for seed, value in groups[label].items()} for label in groups}
    differences = PairwiseComparison(gains)
    leads = [differences.compare(best, label) for label in groups if label != best]
    # A lead that is the same with every seed does not show the noise.
    varying = [lead for lead in leads if lead and (lead.low != lead.high or lead.mean == 0)]
    lowest = [lead.low for lead in varying]
    if len(lowest) < len(leads):
        seeds = f"{_count(groups[best])} do" if len(groups[best]) > 1 else "One seed does"
        return f"{seeds} not show the noise; set seed=1,2,3 or more."
    if within_noise := sum(low <= 0 for low in lowest):
        return f"Within noise of it: {within_noise} of {len(lowest)} others."
    lead_text = format_quality(metric, min(lowest)).replace("%", " percentage points")
    return f"That is more than noise: it leads all others by at least {lead_text} (95% interval)."


def summarize_times(comparison: Comparison) -> list[str]:
    """Name the loader with the lowest time, for each combination of the other values that vary.

    If no loaders are compared, name the configuration with the lowest time.
    """
    timed = comparison.timed_rows
    if len(timed) < 2:
        return [f"Time: {_name_and_time(row.label, row)}" for row in timed] or [NO_TIME]
    ratios = [ratio for row in timed if (ratio := comparison.ratio(row))]
    groups: dict[str, list[ReportRow]] = defaultdict(list)
    for row in timed:
        groups[row.label_without_loader].append(row)
    sentences = [_compare_loaders(comparison, shared, rows) for shared, rows in groups.items() if len(rows) > 1]
    if not sentences:
        within_noise = sum(not ratio.is_clear for ratio in ratios)
        noise = f" Within noise of it: {within_noise} of {len(ratios)} others." if within_noise else ""
        sentences = [f"Lowest time: {_name_and_time(timed[0].label, timed[0])}{noise}"]
    return sentences if ratios else [*sentences, NO_RATIO]


def summarize_launches(comparison: Comparison) -> str:
    """Say how many configurations are launch-bound, and what helps; empty if none is."""
    results = [row.runs[-1].result for row in comparison.timed_rows]
    limits = [(result, find_bottleneck(result)) for result in results]
    bound = [result for result, limit in limits if limit and limit[0] is Bottleneck.LAUNCH]
    if not bound:
        return ""
    eager = [result for result in bound if not has_graph(result)]
    advice = advise_on_launches((eager or bound)[0])
    return f"Launch-bound, the GPU waits for Python: {len(bound)} of {len(results)} configurations; {advice}."


def _compare_loaders(comparison: Comparison, shared: str, rows: Sequence[ReportRow]) -> str:
    """Name the loader with the lowest time among rows with some shared values, and compare the others with it."""
    best, *others = rows
    ratios = {row.loader: comparison.ratio(row, best) for row in others}
    relative = ", ".join(f"{loader} {ratio}" for loader, ratio in ratios.items() if ratio)
    title = f"Lowest time at {shared}" if shared else "Lowest time"
    return f"{title}: {_name_and_time(best.loader, best)}" + (f" Relative to it: {relative}." if relative else "")


def _name_and_time(name: str, row: ReportRow) -> str:
    assert row.epoch_s
    time = f"{format_seconds(row.epoch_s.median)} s per epoch ({format_spread(row.epoch_s)})."
    return f"{name}, {time}" if name else time
