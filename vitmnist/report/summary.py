"""Summarises a comparison in a few sentences: which configuration is best, which loader is fastest; losses.

A difference is stated only where its interval excludes equality. Each sentence is a pure function of the comparison,
but for the best trial of a search, and spells out the overrides of one configuration at most: the table has the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from vitmnist.report.compare import LOADER, OPTION, Comparison, Configuration, overrides, quality_text, quality_title
from vitmnist.report.statistics import MIN_ROUNDS, differences, seconds
from vitmnist.tracking.epoch_table import steady_epochs
from vitmnist.tracking.runs import Run
from vitmnist.tracking.search import search_summary

BUSY = 1.5  # times as long as another epoch of the same configuration
LOSSES = {"train_loss": "training loss", "eval_loss": "evaluation loss"}


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    quality = best_quality(comparison)
    sweeps = dict.fromkeys(run.folder.parent for row in comparison.rows for run in row.runs)
    found = [sentence for folder in sweeps if (sentence := search_summary(folder))]
    sentences = [
        *found,
        quality if comparison.differs and not found else "",  # a search does not repeat a trial with other seeds
        *fastest(comparison),
        busy(comparison),
        not_ranked(comparison),
        *loss_sentences(comparison),
        "" if comparison.differs else quality,
    ]
    return [sentence for sentence in sentences if sentence]


def fastest(comparison: Comparison) -> list[str]:
    """Which loader is the fastest, and whether it matters, for each combination of the other values that vary.

    If anything but the loader varies, the same follows for all configurations.
    """
    ranked = comparison.ranked
    if not ranked:
        return ["No run can be ranked: a run must be completed, alone on the machine, and have a second epoch."]
    if len(ranked) == 1:
        return [f"{ranked[0].label} took {_time(ranked[0])}" if ranked[0].label else _time(ranked[0])]
    groups = {shared: rows for shared, rows in loader_groups(ranked).items() if len(rows) > 1}
    answers = [_answer(comparison, rows, "loader", f" at {shared}" * bool(shared)) for shared, rows in groups.items()]
    return answers if ranked in groups.values() else [*answers, _answer(comparison, ranked, "configuration")]


def loader_groups(rows: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Rows that differ only in the loader and its options, by what they share."""
    groups: dict[str, list[Configuration]] = {}
    for row in rows:
        shared = {key: row.values[key] for key in row.values if key != LOADER and not key.startswith(OPTION)}
        groups.setdefault(overrides(shared), []).append(row)
    return groups


def loader_names(rows: Iterable[Configuration]) -> list[str]:
    """Loaders with their options that vary; the key of an option is given once: `disk (num_workers=2)`, `disk (4)`."""
    names, given = [], set[str]()
    for row in rows:
        loader = row.values.get(LOADER)
        options = {key[len(OPTION) :]: value for key, value in row.values.items() if key.startswith(OPTION)}
        values = [f"{value}" if loader and key in given else f"{key}={value}" for key, value in options.items()]
        given.update(options)
        names.append(f"{loader} ({', '.join(values)})" if loader and values else str(loader or " ".join(values)))
    return names


def _answer(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str = "") -> str:
    """Whether a choice matters, the row with the lowest median, and how the others compare with it."""
    best, *others = rows
    pairs = [comparison.ratios.get(pair) for pair in combinations(rows, 2)]
    verdict = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    if any(ratio and ratio.is_difference for ratio in pairs):
        verdict = f"The {noun} matters{where}"
    elif all(ratio and ratio.low is not None for ratio in pairs):
        verdict = f"No difference between {noun}s is distinguishable from noise{where}"
    known = [(row, ratio) for row in others if (ratio := comparison.ratios.get((row, best)))]
    slower = [ratio for _, ratio in known if ratio.is_difference and ratio.mean > 1]
    is_fastest = len(slower) == len(others)
    name, *names = loader_names([best, *(row for row, _ in known)])
    relative = ", ".join(f"{other} {ratio}" for other, (_, ratio) in zip(names, known, strict=True))
    if noun == "configuration":
        ratios = sorted((ratio for _, ratio in known), key=lambda ratio: ratio.mean)
        name, relative = best.label, " to ".join(map(str, dict.fromkeys([*ratios[:1], *ratios[-1:]])))
    answer = f"{verdict}: {name} {'is the fastest' if is_fastest else 'has the lowest median'}, {_time(best)}"
    return f"{answer} Relative to it: {relative}." if relative else answer


def _time(row: Configuration) -> str:
    return f"{seconds(row.epoch_s.median)} s per epoch ({row.epoch_s})." if row.epoch_s else ""


def not_ranked(comparison: Comparison) -> str:
    """How many rows have no time that is compared, and how to measure those whose runs overlapped."""
    rows = sum(not row.rounds for row in comparison.rows)
    runs = sum(run.overlapping for row in comparison.rows for run in row.runs)
    reasons = f"Not ranked, for the reason in the column status: {rows} of {len(comparison.rows)} rows." if rows else ""
    overlaps = f" {runs} runs overlapped with another on this machine: run one at a time." if runs else ""
    return (reasons + overlaps).strip()


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
            known = [(run.epochs[number].get(key), row) for row, run in runs if number < len(run.epochs)]
            values = [(value, row) for value, row in known if value is not None]
            values.sort(key=lambda pair: (pair[0], pair[1].label))
            if values and values[0][0] != values[-1][0]:
                (low, one), (high, other) = values[0], values[-1]
                name, second = loader_names([one, other])
                names = f"{name} and {second}" if one is not other else f"Rounds of {name or 'one configuration'}"
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
    if sum(len(alike) for _, alike in groups) < 2:
        return ""
    medians = [median(values.values()) for values, _ in groups]
    rows = [row for one, (_, alike) in zip(medians, groups, strict=True) if one == medians[0] for row in alike]
    count, value = f"{len(rows)} of {len(comparison.rows)} configurations", quality_text(metric, medians[0])
    if medians[0] == medians[-1]:
        return f"The same {quality_title(metric)} in {count}: {value}."
    by_seed = [item for row in rows for item in row.by_seed(metric.name).items()]
    low, high = (quality_text(metric, bound(one for _, one in by_seed)) for bound in (min, max))
    seeds = len({seed for seed, _ in by_seed})
    over = f" ({low} to {high} over {seeds} {comparison.block}s)" if seeds > 1 else ""
    first, *others = (row.values for row in rows)
    label = overrides({key: one for key, one in first.items() if all(other.get(key) == one for other in others)})
    is_one = len(rows) == len(groups[0][1])  # apart from the loader
    best = f"Best {quality_title(metric)}: {label if is_one and label else count}, {value}{over}."
    return f"{best} {_certainty(comparison)}" if is_one else best


def _certainty(comparison: Comparison) -> str:
    """Whether the best configuration differs from all others by more than noise."""
    metric, sign = comparison.metric, 1 if comparison.metric.direction == "max" else -1
    values = [{seed: sign * value for seed, value in by_seed.items()} for by_seed, _ in comparison.by_quality]
    found = differences(dict(enumerate(values)))
    leads = [found.get((0, other)) for other in range(1, len(values))]
    low = [lead.low for lead in leads if lead and lead.low is not None]
    if any(lead and lead.low == lead.high is not None for lead in leads):  # of a few images, which change together
        return f"The {comparison.block}s change nothing about it, so they cannot tell whether that is more than noise."
    if len(low) < len(leads):
        few = min(lead.blocks if lead else 0 for lead in leads)
        block, key = comparison.block, "data.holdout_seed" if comparison.block == "fold" else "seed"
        seeds = {0: f"Runs with different {block}s", 1: f"One {block}"}.get(few, f"{few} {block}s")
        return f"{seeds} cannot tell whether that is more than noise; type {key}=1,2,3."
    if unsure := sum(bound <= 0 for bound in low):
        equal = f"{unsure} of {len(low)} others" if len(low) > 1 else "the other"
        return f"That may be noise: {equal} cannot be told apart from it; more {comparison.block}s may tell."
    points = quality_text(metric, min(low)).replace("%", " percentage points")
    return f"That is more than noise: by at least {points} (95% interval)."


def busy(comparison: Comparison) -> str:
    """Says that the machine was busy if a configuration needed much longer at one time than at another."""
    times = {
        row: [epoch["epoch_s"] for runs in row.rounds.values() for run in runs for epoch in steady_epochs(run.epochs)]
        for row in comparison.ranked
    }
    row, known = max(times.items(), key=lambda entry: max(entry[1]) / (min(entry[1]) or 1), default=(None, [1.0]))
    if row is None or max(known) <= BUSY * min(known):
        return ""
    return (
        f"The machine was busy: epochs of {row.label or 'the same run'} took {seconds(min(known))} to "
        f"{seconds(max(known))} s. Measure again when nothing else runs."
    )
