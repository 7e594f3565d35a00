"""Summarises a comparison in a few sentences: which loader, and does it matter; losses; accuracy.

A difference is stated only where its interval excludes equality. Each sentence is a pure function of the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from vitmnist.report.compare import LOADER, OPTION, Comparison, Configuration, overrides
from vitmnist.report.statistics import MIN_ROUNDS, seconds, wilson
from vitmnist.tracking.runs import Run

LOSSES = {"train_loss": "training loss", "eval_loss": "evaluation loss"}


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    sentences = [
        fastest_to_target(comparison),
        *fastest(comparison),
        not_ranked(comparison),
        *loss_sentences(comparison),
        highest_accuracy(comparison),
    ]
    return [sentence for sentence in sentences if sentence]


def fastest_to_target(comparison: Comparison) -> str:
    """Which row reached the target accuracy in the least time, if that was the objective."""
    target = comparison.target_acc
    if target is None:
        return ""
    reached = [(spread, row) for row in comparison.rows if (spread := row.seconds_to(target))]
    if not reached:
        return f"No completed run that had the machine to itself reached {target:g}%."
    spread, row = min(reached, key=lambda pair: pair[0].median)
    runs = f"{spread.n} of {len(row.runs)} runs reached it" if len(row.runs) > 1 else "single run"
    return f"Lowest median time to {target:g}%: {row.label}, {seconds(spread.median)} s ({runs})."


def fastest(comparison: Comparison) -> list[str]:
    """Which loader is the fastest, and whether it matters, for each combination of the other values that vary.

    Without a choice of loaders, the same of all configurations.
    """
    ranked = comparison.ranked
    if len(ranked) < 2:
        alone = [f"{row.label} took " * bool(row.label) + _time(row) for row in ranked]
        return alone or [
            "No run can be ranked: a run must be completed, alone on the machine, and have a second epoch."
        ]
    groups = [(shared, rows) for shared, rows in loader_groups(ranked).items() if len(rows) > 1]
    answers = [_answer(comparison, rows, "loader", f" at {shared}" * bool(shared)) for shared, rows in groups]
    if groups and len(groups[0][1]) == len(ranked):
        return answers
    return [*answers, _answer(comparison, ranked, "configuration")]


def loader_groups(rows: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Rows that differ only in the loader and its options, by what they share."""
    groups: dict[str, list[Configuration]] = {}
    for row in rows:
        shared = {key: row.values[key] for key in row.values if key != LOADER and not key.startswith(OPTION)}
        groups.setdefault(overrides(shared), []).append(row)
    return groups


def _answer(comparison: Comparison, rows: Sequence[Configuration], noun: str, where: str = "") -> str:
    """Whether a choice matters, the row with the lowest median, and how the others compare with it."""
    best, *others = ((row.loader if noun == "loader" else row.label, row) for row in rows)
    different, equal, unknown, is_fastest = [], [], [], True
    for name, row in others:
        ratio = comparison.ratio(row, best[1])
        is_fastest = is_fastest and ratio is not None and ratio.is_difference and ratio.ratio > 1
        if ratio is None:
            unknown.append(f"{name} has no common round with it")
        elif ratio.low is None:
            unknown.append(f"{name} takes {ratio} times as long")
        elif ratio.is_difference:
            different.append(f"{name} takes {ratio} times as long")
        else:
            equal.append(f"{name} ({ratio.ratio:.2f}, {ratio.low:.2f}–{ratio.high:.2f})")
    unsure = f"Whether the {noun} matters{where} takes {MIN_ROUNDS} rounds to tell (repeats={MIN_ROUNDS})"
    matters = f"The {noun} matters{where}" if different else unsure
    sentences = [
        f"{matters if different or unknown else f'The {noun} makes no measurable difference{where}'}: {best[0]} "
        f"{'is the fastest' if is_fastest else 'has the lowest median'}, {_time(best[1])}",
        f"{_listed(different + unknown)}." if different or unknown else "",
        f"Not distinguishable from it: {_listed(equal)}." if equal else "",
    ]
    return " ".join(filter(None, sentences))


def _time(row: Configuration) -> str:
    return f"{seconds(row.epoch_s.median)} s per epoch ({row.epoch_s})." if row.epoch_s else ""


def not_ranked(comparison: Comparison) -> str:
    """The rows without a time that is compared, and how to measure those whose runs overlapped."""
    rows = [f"{row.label or 'a run'} ({row.status:.60})" for row in comparison.rows if not row.rounds]
    count = sum(run.overlapping for row in comparison.rows for run in row.runs)
    advice = f" {count} runs overlapped with another, which slows both down: sweep without a launcher." if count else ""
    return (f"Not ranked: {_listed(rows)}." if rows else "") + advice


def _listed(texts: Sequence[str]) -> str:
    """At most four texts; of a longer list the first two and the last."""
    if len(texts) > 4:
        texts = [*texts[:2], f"{len(texts) - 3} more", texts[-1]]
    return "; ".join(texts)


def loss_sentences(comparison: Comparison) -> list[str]:
    """Whether runs that differ only in loader or round have equal losses, as they promise; if not, where they differ.

    Equality is stated only of completed runs.
    """
    sentences: dict[str, list[str]] = defaultdict(list)  # where each holds
    for shared, rows in loader_groups(comparison.rows).items():
        for seed in dict.fromkeys(run.config.get("seed") for row in rows for run in row.runs):
            runs = [(row, run) for row in rows for run in row.runs if run.config.get("seed") == seed]
            if sentence := _first_difference(runs) or _equality(runs):
                sentences[sentence].append(f"with seed={seed} at {shared}".removesuffix(" at "))
    return [f"{sentence}, {_listed(where)}." for sentence, where in sentences.items()]


def _first_difference(runs: Sequence[tuple[Configuration, Run]]) -> str:
    """The earliest epoch in which losses differ, and the two runs that are furthest apart there."""
    for number in range(max(len(run.epochs) for _, run in runs)):
        for key, loss in LOSSES.items():
            known = [(row.loader, run.epochs[number].get(key)) for row, run in runs if number < len(run.epochs)]
            values = sorted((value, loader) for loader, value in known if value is not None)
            if values and values[0][0] != values[-1][0]:
                (low, one), (high, other) = values[0], values[-1]
                names = f"{one} and {other}" if one != other else f"Rounds of {one or 'one configuration'}"
                return f"{names} first differ in epoch {number + 1}, in the {loss} by {high - low:.2g}"
    return ""


def _equality(runs: Sequence[tuple[Configuration, Run]]) -> str:
    """A statement if several loaders have completed the same epochs; their losses do not differ."""
    completed = [(row.loader, len(run.epochs)) for row, run in runs if run.status == "completed"]
    number = max((epochs for _, epochs in completed), default=0)
    loaders = list(dict.fromkeys(loader for loader, epochs in completed if epochs == number))
    measured = all(epoch.get(key) is not None for _, run in runs for epoch in run.epochs for key in LOSSES)
    if len(loaders) < 2 or not measured:
        return ""
    epochs = f"all {number} epochs" if number > 1 else "their only epoch"
    same = "have the same training and evaluation losses, to the last bit, in"
    return f"{', '.join(loaders[:-1])} and {loaders[-1]} {same} {epochs}"


def highest_accuracy(comparison: Comparison) -> str:
    """The highest median accuracy over the seeds, with a binomial interval and the range of the seeds."""
    by_row = {row: by_seed for row in comparison.rows if (by_seed := row.by_seed("eval_acc"))}
    medians = {row: median(by_seed.values()) for row, by_seed in by_row.items()}
    if len(set(medians.values())) < 2:
        return ""
    highest = max(medians.values())
    best = [row for row in by_row if medians[row] == highest]
    values = by_row[best[0]].values()
    seeds = f"{min(values):.2f}–{max(values):.2f} over {len(values)} seeds" if len(values) > 1 else "one seed"
    text = f"Highest median accuracy: {_listed([row.label for row in best])}, {highest:.2f}%"
    runs = [run for row in by_row for run in row.runs if run.status == "completed"]
    images, *others = {run.section("dataset").get("test_size") or 0 for run in runs}
    if others or not images:
        return f"{text} ({seeds})."
    # All seeds evaluate the same images, so more seeds do not narrow this interval.
    low, high = (100 * bound for bound in wilson(min(highest / 100, 1.0), images))
    text = f"{text} (95% interval {low:.2f}–{high:.2f} for {images:,} images; {seeds})."
    within = [row.label for row in by_row if row not in best and medians[row] >= low]
    return f"{text} Within this interval: {_listed(within)}." if within else text
