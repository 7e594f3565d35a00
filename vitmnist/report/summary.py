"""Summarises a comparison in a few sentences: fastest configuration, effect of the loader, losses, accuracy.

A difference is stated only where its interval excludes equality. Each sentence is a pure function of the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from vitmnist.report.compare import Comparison, by_time
from vitmnist.report.intervals import required_rounds, seconds, wilson
from vitmnist.tracking.runs import Run

LOSSES = {"train_loss": "training loss", "eval_loss": "evaluation loss"}


def summary(comparison: Comparison) -> list[str]:
    """The sentences, the most important one first."""
    sentences = [
        fastest_to_target(comparison),
        fastest(comparison),
        effect_of_loader(comparison),
        overlapping(comparison),
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


def fastest(comparison: Comparison) -> str:
    """The row with the lowest median epoch time, and how the others compare with it."""
    if not comparison.ranked:
        return "No run can be ranked: a run must be completed, alone on the machine, and have more than one epoch."
    best = comparison.ranked[0]
    assert best.epoch_s
    tied = [row for row in comparison.ranked if row.epoch_s and row.epoch_s.median == best.epoch_s.median]
    ratios = [(row.label, comparison.ratio(row, best)) for row in comparison.ranked[len(tied) :]]
    different = [f"{label} takes {ratio} times as long" for label, ratio in ratios if ratio and ratio.is_difference]
    equal = [label for label, ratio in ratios if ratio and ratio.interval and not ratio.is_difference]
    unknown = [label for label, ratio in ratios if not ratio or not ratio.interval]
    unranked = [f"{row.label or 'a run'} ({row.status:.60})" for row in comparison.rows if not row.rounds]
    is_fastest = len(tied) == 1 and all(ratio and ratio.is_difference and ratio.ratio > 1 for _, ratio in ratios)
    head = "" if len(comparison.ranked) == 1 else "Fastest: " if is_fastest else "Lowest median: "
    label = " and ".join(row.label for row in tied if row.label)
    needed = required_rounds(comparison.error)
    sentences = [
        f"{head}{label}{', ' if label else ''}{seconds(best.epoch_s.median)} s per epoch ({best.epoch_s}).",
        f"In comparison, {_listed(different)}." if different else "",
        f"Not distinguishable from it: {_listed(equal)}." if equal else "",
        f"At least {needed} common rounds are needed to compare it with {_listed(unknown)}." if unknown else "",
        f"Not ranked: {_listed(unranked)}." if unranked else "",
    ]
    return " ".join(filter(None, sentences))


def _listed(texts: Sequence[str]) -> str:
    """At most four texts; of a longer list the first two and the last."""
    if len(texts) > 4:
        texts = [*texts[:2], f"{len(texts) - 3} more", texts[-1]]
    return "; ".join(texts)


def effect_of_loader(comparison: Comparison) -> str:
    """How the slowest loader compares with the fastest by the training pass alone, all else being equal."""
    parts = []
    for shared, rows in comparison.loader_groups().items():
        ordered = by_time(rows, "train_s")
        if len(ordered) > 1 and (ratio := comparison.ratio(ordered[-1], ordered[0], "train_s")):
            where = f" at {shared}" if shared else ""
            parts.append(f"{ordered[-1].loader} takes {ratio} times as long as {ordered[0].loader}{where}")
    return f"Effect of the loader on the training pass (train_s): {'; '.join(parts)}." if parts else ""


def overlapping(comparison: Comparison) -> str:
    """How many runs were active while another one was."""
    count = sum(run.overlapping for row in comparison.rows for run in row.runs)
    if not count:
        return ""
    return (
        f"{count} run{'s' if count > 1 else ''} overlapped with another run on the same machine. Their times are not "
        "ranked, because runs slow each other down. To measure times, run the sweep without a launcher."
    )


def loss_sentences(comparison: Comparison) -> list[str]:
    """Which loaders have equal losses, as they promise, and the first difference where they do not.

    Loaders are compared with all else being equal, seed included. Equality is stated only of completed runs.
    """
    differences: list[str] = []
    equal: dict[str, list[str]] = defaultdict(list)  # where each statement holds
    for shared, rows in comparison.loader_groups().items():
        for seed in dict.fromkeys(run.config.get("seed") for row in rows for run in row.runs):
            where = f"with seed={seed} at {shared}".removesuffix(" at ")
            runs: dict[str, Run] = {}
            for row in rows:
                repeats = [run for run in row.runs if run.config.get("seed") == seed]
                if found := _first_difference([(row.label, run) for run in repeats]):
                    # The loader is not the cause, so these runs are not compared with those of other loaders.
                    differences.append(f"Repeats of {row.label or 'the run'} with seed={seed} {found[2]}.")
                elif repeats:
                    runs[row.loader] = max(repeats, key=lambda run: (run.status == "completed", len(run.epochs)))
            if found := _first_difference(list(runs.items())):
                differences.append(f"{found[0]} and {found[1]} {where} {found[2]}.")
            for statement in _equalities(runs):
                equal[statement].append(where)
    return [f"{statement}, {_listed(places)}." for statement, places in equal.items()] + differences


def _first_difference(runs: Sequence[tuple[str, Run]]) -> tuple[str, str, str] | None:
    """The earliest epoch in which losses of runs differ: the names of the two furthest apart, and a description."""
    for number in range(max((len(run.epochs) for _, run in runs), default=0)):
        for key, loss in LOSSES.items():
            epochs = [(name, run.epochs[number]) for name, run in runs if number < len(run.epochs)]
            values = sorted((epoch[key], name) for name, epoch in epochs if epoch.get(key) is not None)
            if values and values[0][0] != values[-1][0]:
                (low, name), (high, other) = values[0], values[-1]
                return name, other, f"first differ in epoch {number + 1}, in the {loss} by {high - low:.2g}"
    return None


def _equalities(runs: Mapping[str, Run]) -> Iterator[str]:
    """A statement for each set of loaders whose completed runs have the same losses in all epochs."""
    loaders: dict[tuple[float | None, ...], list[str]] = defaultdict(list)
    for loader, run in runs.items():
        if run.status == "completed":
            loaders[tuple(epoch.get(key) for epoch in run.epochs for key in LOSSES)].append(loader)
    for losses, (*names, last) in loaders.items():
        if names and None not in losses:
            number = len(losses) // len(LOSSES)
            epochs = f"all {number} epochs" if number > 1 else "their only epoch"
            same = "have the same training and evaluation losses, to the last bit, in"
            yield f"{', '.join(names)} and {last} {same} {epochs}"


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
