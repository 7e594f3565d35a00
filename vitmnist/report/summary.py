"""Summarises a comparison in a few sentences: the best quality, the lowest time, and how certain the differences are.

A sentence spells out the overrides of at most one configuration; the table has the others.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev

from vitmnist.metrics import MetricInfo
from vitmnist.report.comparison import Comparison, ReportRow, round_floats
from vitmnist.report.statistics import MIN_ROUNDS, format_range
from vitmnist.timing.table import Bottleneck, Spread, format_seconds, round_seconds
from vitmnist.tracking.bottleneck import advise_on_launches, find_bottleneck, has_graph

NO_TIME = "No times to compare: that takes completed runs, alone on a machine, with two epochs since their last start."
CHOSEN_ON_TEST = "Chosen on the test split; set data.holdout to choose on a validation split."


def summarize_comparison(comparison: Comparison) -> list[str]:
    """Return the sentences about a comparison, the most important one first."""
    choice = CHOSEN_ON_TEST if comparison.quality_differs and comparison.eval_split == "test" else ""
    sentences = [summarize_quality(comparison), summarize_noise(comparison), choice]
    sentences += [*summarize_times(comparison), summarize_launches(comparison)]
    return [*map(round_floats, filter(None, sentences))]


def summarize_quality(comparison: Comparison) -> str:
    """Name the configuration with the best value of the monitored metric, or give the value that all have.

    Empty if no run was completed.
    """
    metric = comparison.metric
    groups = comparison.quality_by_seed
    if not groups:
        return ""
    label, values = next(iter(groups.items()))
    title = comparison.title(metric).removesuffix(", %")
    best = format_mean(metric, values.values())
    over_seeds = f" (mean ± sd over {_count(values)})" if len(values) > 1 else ""
    if not comparison.quality_differs:
        where = " in each configuration" if len(groups) > 1 else ""
        return f"{title[0].upper()}{title[1:]}: {best}{over_seeds}{where}."
    extreme = "Highest" if metric.direction == "max" else "Lowest"
    return f"{extreme} {'mean ' if over_seeds else ''}{title}: {label}, {best}{over_seeds}."


def format_mean(metric: MetricInfo, values: Collection[float]) -> str:
    """Format a value, or the mean and the standard deviation of several, such as `97.31% ± 0.42`."""
    mean = metric.format(fmean(values))
    return f"{mean} ± {metric.format(stdev(values)).rstrip('%')}" if len(values) > 1 else mean


def describe_ratio(comparison: Comparison, row: ReportRow) -> str:
    """Format the ratio to the baseline; empty if it may be noise, with fewer than three rounds or with other rounds."""
    baseline = comparison.baselines.get(row)
    ratio = comparison.ratio_to_baseline(row)
    if not baseline or not ratio or not ratio.is_clear or row.rounds.keys() != baseline.rounds.keys():
        is_baseline = baseline is row and len(row.rounds) >= MIN_ROUNDS and len(comparison.timed_rows) > 1
        return "1×" if is_baseline else ""
    # The quotient of the times as they are printed, so that a reader finds the same ratio.
    return f"{round_seconds(row.median_s) / round_seconds(baseline.median_s):.2f}×"


def _count(values: Mapping[str, float]) -> str:
    """Count the values by seed, as `5 folds` or `3 seeds`."""
    return f"{len(values)} {'folds' if all('data.fold=' in seeds for seeds in values) else 'seeds'}"


def summarize_noise(comparison: Comparison) -> str:
    """Say whether the best setting leads by more than the noise over the seeds; empty if all have the same quality."""
    if not comparison.leads_by_setting:
        return ""
    best = next(iter(comparison.quality_by_seed.values()))
    count = _count(best)
    leads = [*comparison.leads_by_setting.values()]
    # A lead that is the same with every seed does not show the noise.
    lowest = [lead.low for lead in leads if lead and (lead.low != lead.high or lead.mean == 0)]
    if len(best) >= MIN_ROUNDS and None in leads:
        return f"{leads.count(None)} of {len(leads)} others have too few seeds in common with it to compare."
    if len(lowest) < len(leads):
        seeds = f"{count} do" if len(best) > 1 else "One seed does"
        return f"{seeds} not show the noise; set seed=1,2,3 or more."
    if names := comparison.within_noise:
        others = "any other" if len(names) == len(leads) else _list_names(names)
        return f"{count} are too few to separate it from {others}; add seeds."
    lead_text = comparison.metric.format(min(lowest)).replace("%", " percentage points")
    caveat = ", too narrow for folds, which share training images" if count.endswith("folds") else ""
    return f"That is more than noise: it leads all others by at least {lead_text} (95% interval{caveat})."


def _list_names(names: Sequence[str]) -> str:
    """List at most three names, and count the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def summarize_times(comparison: Comparison) -> list[str]:
    """Name the loader with the lowest time, for each combination of the other values that vary.

    If no loaders are compared, name the configuration with the lowest time. With too few rounds, give the range.
    """
    times = [row.epoch_s for row in comparison.timed_rows if row.epoch_s]
    if len(times) < 2:
        return [f"Time: {_format_time(time)}." for time in times] or [NO_TIME]
    if not any(map(comparison.ratio_to_baseline, comparison.timed_rows)):
        rounds = "one round" if max(time.n for time in times) == 1 else "fewer than three rounds in common"
        span = f"{format_seconds(times[0].median)}–{format_seconds(times[-1].median)}"
        return [f"Times: {span} s per epoch, {rounds}, not compared; set repeats=3 or more."]
    return [_compare_times(comparison, *group) for group in comparison.time_groups.items()]


def summarize_launches(comparison: Comparison) -> str:
    """Say how many configurations are launch-bound, and what helps; empty if none is."""
    results = [row.runs[-1].result for row in comparison.timed_rows]
    bound = [result for result in results if (limit := find_bottleneck(result)) and limit[0] is Bottleneck.LAUNCH]
    if not bound:
        return ""
    advice = advise_on_launches(next((result for result in bound if not has_graph(result)), bound[0]))
    return f"Launch-bound, the GPU waits for Python: {len(bound)} of {len(results)} configurations; {advice}."


def _compare_times(comparison: Comparison, setting: str, rows: Sequence[ReportRow]) -> str:
    """Name the row with the lowest time, and say which others take longer beyond noise."""
    best, *others = rows
    assert best.epoch_s
    has_loaders = len({row.label_without_loader for row in rows}) == 1
    names = {row: row.loader if has_loaders else row.label for row in rows}
    ratios = {row: comparison.ratio_to_baseline(row) for row in others}
    title = "Lowest time of those compared" if None in ratios.values() else "Lowest time"
    if setting:
        title += f" at {setting}"
    answer = [f"{title}: {names[best]}, {_format_time(best.epoch_s)}."]
    slower = [f"{names[row]} takes {ratio}" for row, ratio in ratios.items() if ratio and ratio.is_clear]
    if slower and has_loaders:
        answer.append(f"Compared within each round, {', '.join(slower)}.")
    if within_noise := [names[row] for row, ratio in ratios.items() if ratio and not ratio.is_clear]:
        answer.append(f"Within noise of it: {_list_names(within_noise)}.")
    if missing := [names[row] for row, ratio in ratios.items() if not ratio]:
        answer.append(f"Not compared, with fewer than {MIN_ROUNDS} rounds in common: {_list_names(missing)}.")
    return " ".join(answer)


def _format_time(time: Spread) -> str:
    rounds = f"range {format_range(time)}" if time.n > 1 else "one round"
    return f"{format_seconds(time.median)} s per epoch ({rounds})"
