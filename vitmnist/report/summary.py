"""Summarises a comparison in a few sentences: which configuration is best, which loader is fastest; losses.

A difference is stated only where its interval excludes equality. Each sentence is a pure function of the comparison,
but for the best trial of a search, and spells out the overrides of one configuration at most: the table has the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from vitmnist.report.comparison import Comparison, Configuration, overrides
from vitmnist.report.statistics import MIN_ROUNDS, Differences, seconds
from vitmnist.tracking.epoch_table import Metric, steady_epochs
from vitmnist.tracking.result import Run, search_summary

LOADER, OPTION = "data/loader", "data.loader."  # columns of a comparison
BUSY = 1.5  # times as long as another epoch of the same configuration
LOSSES = {"train_loss": "training loss", "eval_loss": "evaluation loss"}


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    sweeps = dict.fromkeys(run.folder.parent for row in comparison.rows for run in row.runs)
    searches = [sentence for folder in sweeps if (sentence := search_summary(folder))]
    sentences = [
        *searches,
        "" if searches else best_quality(comparison),  # a search does not repeat a trial with other seeds
        *fastest(comparison),
        busy(comparison),
        *loss_sentences(comparison),
    ]
    return [sentence for sentence in sentences if sentence]


def quality_title(metric: Metric) -> str:
    """`accuracy`: a metric without its unit; by its name if it has no column."""
    return (metric.column or metric.name).partition(",")[0]


def quality_text(metric: Metric, value: float) -> str:
    """`97.10%` or `0.1234`."""
    return f"{value:.{4 if metric.digits is None else metric.digits}f}{'%' * (metric.unit == '%')}"


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


def loader_groups(rows: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Rows that differ only in the loader and its options, by what they share."""
    groups: dict[str, list[Configuration]] = {}
    for row in rows:
        shared = {key: row.values[key] for key in row.values if key != LOADER and not key.startswith(OPTION)}
        groups.setdefault(overrides(shared), []).append(row)
    return groups


def loader_names(rows: Iterable[Configuration]) -> list[str]:
    """Loaders with their options that vary; the key of an option is given once: `disk (num_workers=2)`, `disk (4)`."""
    names, named = [], set[str]()
    for row in rows:
        loader = row.values.get(LOADER)
        options = {key[len(OPTION) :]: value for key, value in row.values.items() if key.startswith(OPTION)}
        values = [f"{value}" if loader and key in named else f"{key}={value}" for key, value in options.items()]
        named.update(options)
        names.append(f"{loader} ({', '.join(values)})" if loader and values else str(loader or " ".join(values)))
    return names


def _answer(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str = "") -> str:
    """Whether a choice matters, the row with the lowest median, and how the others compare with it."""
    best, *others = rows
    pairs = [comparison.ratio(*pair) for pair in combinations(rows, 2)]
    verdict = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    if any(ratio and ratio.is_difference for ratio in pairs):
        verdict = f"The {noun} matters{where}"
    elif all(ratio and ratio.low is not None for ratio in pairs):
        verdict = f"No difference between {noun}s is distinguishable from noise{where}"
    ratios = {row: ratio for row in others if (ratio := comparison.ratio(row, best))}
    is_fastest = len(ratios) == len(others) and all(ratio.is_difference and ratio.mean > 1 for ratio in ratios.values())
    name, *names = loader_names([best, *ratios])
    relative = ", ".join(f"{other} {ratio}" for other, ratio in zip(names, ratios.values(), strict=True))
    if noun == "configuration":
        extremes = sorted(ratios.values(), key=lambda ratio: ratio.mean)
        name, relative = best.label, " to ".join(map(str, dict.fromkeys([*extremes[:1], *extremes[-1:]])))
    answer = f"{verdict}: {name} {'is the fastest' if is_fastest else 'has the lowest median'}, {_time(best)}"
    return f"{answer} Relative to it: {relative}." if relative else answer


def _time(row: Configuration) -> str:
    return f"{seconds(row.epoch_s.median)} s per epoch ({row.epoch_s})." if row.epoch_s else ""


def loss_sentences(comparison: Comparison) -> list[str]:
    """Whether runs that differ only in loader or round have equal losses, as they promise; if not, where they differ.

    Equality is stated only of completed runs.
    """
    cases: dict[str, list[str]] = defaultdict(list)  # where each sentence holds
    for shared, rows in loader_groups(comparison.rows).items():
        for seeds in dict.fromkeys(run.seeds for row in rows for run in row.runs):
            runs = [(row, run) for row in rows for run in row.runs if run.seeds == seeds]
            if sentence := _first_difference(runs) or _equality(runs):
                fold = f" data.holdout_seed={seeds[1]}" if comparison.block != "seed" else ""
                cases[sentence].append(f"with seed={seeds[0]}{fold} at {shared}".removesuffix(" at "))
    return [
        f"{text}, {first}" + (f", and in {len(others)} more group{'s' * (len(others) > 1)}." if others else ".")
        for text, (first, *others) in cases.items()
    ]


def _first_difference(runs: Sequence[tuple[Configuration, Run]]) -> str:
    """The earliest epoch in which losses differ, and the two runs that are furthest apart there."""
    for number in range(max((len(run.epochs) for _, run in runs), default=0)):
        for key, loss in LOSSES.items():
            recorded = [(run.epochs[number].get(key), row) for row, run in runs if number < len(run.epochs)]
            values = [(value, row) for value, row in recorded if value is not None]
            values.sort(key=lambda pair: (pair[0], pair[1].label))
            if values and values[0][0] != values[-1][0]:
                (low, lowest), (high, highest) = values[0], values[-1]
                name, other = loader_names([lowest, highest])
                names = f"{name} and {other}" if lowest is not highest else f"Rounds of {name or 'one configuration'}"
                return f"{names} first differ in epoch {number + 1}, in the {loss} by {high - low:.2g}"
    return ""


def _equality(runs: Sequence[tuple[Configuration, Run]]) -> str:
    """A statement that losses are equal if several loaders completed the same epochs; called if no two differ."""
    completed = [(row, len(run.epochs)) for row, run in runs if run.status == "completed"]
    number = max((epochs for _, epochs in completed), default=0)
    rows = {row for row, epochs in completed if epochs == number}
    if len(rows) < 2:
        return ""
    loaders = loader_names(sorted(rows, key=lambda row: row.label))
    epochs = f"all {number} epochs" if number > 1 else "their only epoch"
    same = "have the same training and evaluation losses, to the last bit, in"
    return f"{', '.join(loaders[:-1])} and {loaders[-1]} {same} {epochs}"


def best_quality(comparison: Comparison) -> str:
    """Which configuration is the best by the monitored metric, and whether that is more than noise over the seeds."""
    groups, metric = comparison.by_quality, comparison.metric
    if not comparison.differs:
        return ""
    best = median(groups[0][0].values())
    rows = [row for values, alike in groups if median(values.values()) == best for row in alike]
    by_seed = [item for row in rows for item in row.by_seed(metric.name).items()]
    low, high = (quality_text(metric, bound(value for _, value in by_seed)) for bound in (min, max))
    seeds = len({seed for seed, _ in by_seed})
    over = f" ({low} to {high} over {seeds} {comparison.block}s)" if seeds > 1 else ""
    first, *others = (row.values for row in rows)
    label = overrides({key: value for key, value in first.items() if all(other.get(key) == value for other in others)})
    is_single = len(rows) == len(groups[0][1])  # apart from the loader
    name = label if is_single and label else f"{len(rows)} of {len(comparison.rows)} configurations"
    sentence = f"Best {quality_title(metric)}: {name}, {quality_text(metric, best)}{over}."
    return f"{sentence} {_certainty(comparison)}" if is_single else sentence


def _certainty(comparison: Comparison) -> str:
    """Whether the best configuration differs from all others by more than noise."""
    metric, block = comparison.metric, comparison.block
    sign = 1 if metric.direction == "max" else -1
    values = [{seed: sign * value for seed, value in by_seed.items()} for by_seed, _ in comparison.by_quality]
    differences = Differences(dict(enumerate(values)))
    leads = [differences.get(0, other) for other in range(1, len(values))]
    low = [lead.low for lead in leads if lead and lead.low is not None]
    if any(lead and lead.low == lead.high is not None for lead in leads):  # of a few images, which change together
        return f"The {block}s change nothing about it, so they cannot tell whether that is more than noise."
    if len(low) < len(leads):
        few = min(lead.blocks if lead else 0 for lead in leads)
        key = "data.holdout_seed" if block == "fold" else "seed"
        seeds = {0: f"Runs with different {block}s", 1: f"One {block}"}.get(few, f"{few} {block}s")
        return f"{seeds} cannot tell whether that is more than noise; type {key}=1,2,3."
    if unsure := sum(bound <= 0 for bound in low):
        equal = f"{unsure} of {len(low)} others" if len(low) > 1 else "the other"
        return f"That may be noise: {equal} cannot be told apart from it; more {block}s may tell."
    points = quality_text(metric, min(low)).replace("%", " percentage points")
    return f"That is more than noise: by at least {points} (95% interval)."


def busy(comparison: Comparison) -> str:
    """Says that the machine was busy if a configuration needed much longer at one time than at another."""
    for row in comparison.ranked:
        runs = [run for runs in row.rounds.values() for run in runs]
        times = [epoch["epoch_s"] for run in runs for epoch in steady_epochs(run.epochs)]
        if max(times) > BUSY * min(times):
            return (
                f"The machine was busy: epochs of {row.label or 'the same run'} took {seconds(min(times))} to "
                f"{seconds(max(times))} s. Measure again when nothing else runs."
            )
    return ""
