"""Summarises a comparison in a few sentences: fastest configuration, effect of the loader, losses, accuracy.

Each sentence is a pure function of a comparison, and names a difference only where its interval excludes equality.
"""

from __future__ import annotations

import math

from vitmnist.report.accuracy import highest_accuracy
from vitmnist.report.compare import LOADER, Comparison, Configuration
from vitmnist.report.intervals import least_runs
from vitmnist.report.losses import loss_sentences
from vitmnist.report.text import interval_text, listed, row_name, seconds, spread_text, where


def summary(comparison: Comparison) -> list[str]:
    """The sentences; the part in `**` is the headline."""
    sentences = [
        first_at_target(comparison),
        fastest(comparison),
        effect_of_loader(comparison),
        overlapping(comparison),
        *loss_sentences(comparison),
        highest_accuracy(comparison),
    ]
    return [sentence for sentence in sentences if sentence]


def fastest(comparison: Comparison) -> str:
    """The row with the lowest median epoch time, and which of the others it is shown to be faster than."""
    if not any(row.epoch_s for row in comparison.rows):
        return "No run has recorded the time of an epoch, so there is nothing to compare yet."
    if not comparison.ranked:
        return "Nothing is ranked: no run completed, had the machine to itself, and has an epoch after its first."
    best, *others = comparison.ranked
    assert best.epoch_s
    label, time = row_name(comparison, best), f"{seconds(best.epoch_s.median)} s per epoch"
    if not others:
        return f"**{label}{', ' if label else ''}{time}** ({spread_text(best.epoch_s)})."
    verdicts: dict[str, list[str]] = {"faster": [], "slower": [], "noise": [], "few": [], "unpaired": []}
    for row in others:
        verdict, text = _verdict(comparison, best, row)
        verdicts[verdict].append(text)
    head = "Fastest" if len(verdicts["faster"]) == len(others) else "Lowest median"
    parts = [f"**{head}: {label}, {time}** ({spread_text(best.epoch_s)})."]
    for verdict in ("faster", "slower"):  # slower: in the rounds that both have
        if verdicts[verdict]:
            parts.append(f"By epoch_s it is {verdict} than {listed(verdicts[verdict], '; than ')}.{_drift(comparison)}")
    if verdicts["noise"]:
        parts.append(f"Within noise of it: {listed(verdicts['noise'])}.")
    if verdicts["unpaired"]:
        parts.append(f"Without a common seed and round, and so not compared with it: {listed(verdicts['unpaired'])}.")
    if few := verdicts["few"]:
        names = "any other" if 1 < len(few) == len(others) else listed(few)
        parts.append(f"Not enough repeats to tell it from {names}: repeats={_repeats_needed(comparison)} could.")
        parts.append(_highest(best, others[-1], row_name(comparison, others[-1])))
    return " ".join(parts)


def _verdict(comparison: Comparison, best: Configuration, row: Configuration) -> tuple[str, str]:
    """How the best row compares with another, and what to say of that one."""
    ratio, label = comparison.ratio(row, best), row_name(comparison, row)
    if ratio is None:
        return "unpaired", label
    if ratio.interval is None:
        return "few", label
    if not ratio.excludes_one:
        return "noise", label
    verdict, factor = ("faster", ratio) if ratio.ratio > 1 else ("slower", comparison.ratio(best, row))
    assert factor
    assert factor.interval
    return verdict, f"{label} by a factor of {factor.ratio:.2f} ({interval_text(factor.interval)})"


def _highest(best: Configuration, last: Configuration, label: str) -> str:
    """The point estimate of the whole range, where it is not shown to be one."""
    assert best.epoch_s
    assert last.epoch_s
    runs = sorted({best.epoch_s.n, last.epoch_s.n})
    of = "single runs" if runs == [1] else f"medians of {' and '.join(map(str, runs))} runs"
    ratio = last.epoch_s.median / best.epoch_s.median
    return f"The highest median, {label} with {seconds(last.epoch_s.median)} s, is {ratio:.2f} times as long ({of})."


def _repeats_needed(comparison: Comparison) -> int:
    """The least `repeats=` that gives every pair enough runs; the seeds of a round are runs too."""
    seeds = min(len({seed for seed, *_ in row.ranked}) for row in comparison.ranked)
    return math.ceil(least_runs(comparison.error) / seeds)


def _drift(comparison: Comparison) -> str:
    """What to add to a difference if every pair is of one round."""
    rounds = {key[1:] for row in comparison.ranked for key in row.ranked}
    return (
        " All runs are of one round, where a drift of the machine looks like a difference." if len(rounds) == 1 else ""
    )


def effect_of_loader(comparison: Comparison) -> str:
    """The fastest and the slowest loader by the training pass alone, with all else the same."""
    parts, places = [], []
    for shared, rows in comparison.loader_groups().items():
        timed = [(time.median, row) for row in rows if row.ranked and (time := row.spread("train_s"))]
        ordered = [row for _, row in sorted(timed, key=lambda pair: pair[0])]
        if len({comparison.value(row, LOADER) for row in ordered}) > 1:
            parts.append(_loader_pair(comparison, ordered[0], ordered[-1]))
            places.append(f" at {where(shared)}" if shared else "")
    if not parts:
        return ""
    are_few = any(part.endswith(" runs)") for part in parts)
    few = " Without an interval the runs are too few to tell a factor from 1." if are_few else ""
    told = "; ".join(part + place for part, place in zip(parts, places, strict=True))
    return f"Effect of the loader on the training pass (train_s): {told}.{few}"


def _loader_pair(comparison: Comparison, best: Configuration, worst: Configuration) -> str:
    low, high = (comparison.loader_label(row) for row in (best, worst))
    ratio, whole = comparison.ratio(worst, best, "train_s"), comparison.ratio(worst, best)
    if ratio is None or whole is None:
        return f"{low} has the lowest median and {high} the highest, without a common seed and round"
    if ratio.ratio < 1:  # by the rounds that both have
        return _loader_pair(comparison, worst, best)
    if ratio.interval is None:
        runs = "single runs" if ratio.pairs == 1 else f"{ratio.pairs} pairs of runs"
        return f"{high} took {ratio.ratio:.2f} times as long as {low} ({runs})"
    # A difference of the training pass counts only with one of the epoch: the two are one test, not two.
    if ratio.excludes_one and whole.excludes_one:
        return f"{low} is faster than {high} by a factor of {ratio.ratio:.2f} ({interval_text(ratio.interval)})"
    by = " by epoch_s" if ratio.excludes_one else ""
    return (
        f"{low} and {high} are within noise of each other{by} (factor {ratio.ratio:.2f}, "
        f"{interval_text(ratio.interval)})"
    )


def overlapping(comparison: Comparison) -> str:
    """Whether runs ran at the same time on the machine."""
    number = sum(run.overlapping for row in comparison.rows for run in row.runs)
    if not number:
        return ""
    return (
        f"{number} runs overlapped with another run on the same machine, and each slowed the other down: their times "
        "are not ranked. To measure, sweep without a launcher, one job after another."
    )


def first_at_target(comparison: Comparison) -> str:
    """If the aim was to reach an accuracy: which row took the least time."""
    target = comparison.target_acc
    if target is None:
        return ""
    reached = [(spread, row) for row in comparison.rows if (spread := row.seconds_to(target))]
    if not reached:
        return f"**No completed run reached {target:g}%.**"
    spread, row = min(reached, key=lambda pair: pair[0].median)
    runs = f"in {spread.n} of {len(row.runs)} runs" if len(row.runs) > 1 else "single run"
    return f"**Lowest median time to {target:g}%: {row_name(comparison, row)}, {seconds(spread.median)} s** ({runs})."
