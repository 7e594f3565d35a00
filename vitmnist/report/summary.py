"""Summarises a comparison in a few sentences: fastest configuration, effect of the loader, losses, accuracy.

Each sentence is a pure function of a comparison, and names a difference only where its interval excludes equality.
"""

from __future__ import annotations

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
    tied = [row for row in others if row.epoch_s and row.epoch_s.median == best.epoch_s.median]
    others = [row for row in others if row not in tied]
    label = " and ".join(row_name(comparison, row) for row in (best, *tied))
    verdicts: dict[str, list[str]] = {"faster": [], "slower": [], "equal": [], "few": [], "unpaired": []}
    for row in others:
        verdict, text = _verdict(comparison, best, row)
        verdicts[verdict].append(text)
    head = "Fastest: " if others and len(verdicts["faster"]) == len(others) and not tied else "Lowest median: "
    parts = [
        f"**{head if others or tied else ''}{label}{', ' if label else ''}{seconds(best.epoch_s.median)} s per epoch** "
        f"({spread_text(best.epoch_s)})."
    ]
    for verdict in ("faster", "slower"):  # slower: in the rounds that both have
        if verdicts[verdict]:
            parts.append(f"By epoch_s it is {verdict} than {listed(verdicts[verdict], '; than ')}.")
    if verdicts["equal"]:
        parts.append(f"Not distinguishable from it: {listed(verdicts['equal'])}.")
    if verdicts["unpaired"]:
        parts.append(f"Without a common round, and so not compared with it: {listed(verdicts['unpaired'])}.")
    if few := verdicts["few"]:
        names = "any other" if 1 < len(few) == len(others) else listed(few)
        needed = least_runs(comparison.error)
        parts.append(f"Not enough repeats to tell it from {names}: {needed} rounds in common are needed.")
        parts.append(_highest(comparison, best, others[-1]))
    return " ".join([*parts, *_not_ranked(comparison)])


def _verdict(comparison: Comparison, best: Configuration, row: Configuration) -> tuple[str, str]:
    """How the best row compares with another, and what to say of that one."""
    ratio, label = comparison.ratio(row, best), row_name(comparison, row)
    if ratio is None:
        return "unpaired", label
    if ratio.interval is None:
        return "few", label
    if not ratio.is_difference:
        return "equal", label
    verdict, factor = ("faster", ratio) if ratio.ratio > 1 else ("slower", comparison.ratio(best, row))
    assert factor
    assert factor.interval
    return verdict, f"{label} by a factor of {factor.ratio:.2f} ({interval_text(factor.interval)})"


def _highest(comparison: Comparison, best: Configuration, last: Configuration) -> str:
    """The point estimate of the whole range, where it is not shown to be a difference."""
    ratio = comparison.ratio(last, best)
    if ratio is None:
        return ""
    assert last.epoch_s
    rounds = "a single round" if ratio.rounds == 1 else f"the median of {ratio.rounds} rounds"
    return (
        f"The highest median, {row_name(comparison, last)} with {seconds(last.epoch_s.median)} s, is {ratio.ratio:.2f} "
        f"times as long ({rounds})."
    )


def _not_ranked(comparison: Comparison) -> list[str]:
    """The rows without a time that is compared, so that none of them is overlooked."""
    names = [
        f"{row_name(comparison, row) or 'a run'} ({row.status.partition(':')[0].removeprefix('completed, ')})"
        for row in comparison.rows
        if not row.ranked
    ]
    return [f"Not ranked: {listed(names)}."] if names else []


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
    few = " A factor without an interval may be chance." if any(part.endswith(")*") for part in parts) else ""
    sentence = "; ".join(part.removesuffix("*") + place for part, place in zip(parts, places, strict=True))
    return f"Effect of the loader on the training pass (train_s): {sentence}.{few}"


def _loader_pair(comparison: Comparison, best: Configuration, worst: Configuration) -> str:
    """The comparison of two rows; ends in `*` where it has no interval."""
    ratio = comparison.ratio(worst, best, "train_s")
    if ratio and ratio.ratio < 1:  # by the rounds that both have
        best, worst = worst, best
        ratio = comparison.ratio(worst, best, "train_s")
    whole = comparison.ratio(worst, best)
    low, high = (comparison.loader_label(row) for row in (best, worst))
    if ratio is None or whole is None:
        return f"{low} has the lowest median and {high} the highest, without a common round"
    if ratio.interval is None:
        rounds = "a single round" if ratio.rounds == 1 else f"the median of {ratio.rounds} rounds"
        return f"{high} took {ratio.ratio:.2f} times as long as {low} ({rounds})*"
    factor = f"{ratio.ratio:.2f} ({interval_text(ratio.interval)})"
    # A difference of the training pass counts only with one of the epoch: the two are one test, not two.
    if ratio.is_difference and whole.is_difference:
        opposite = "" if whole.ratio > 1 else ", but slower by epoch_s"
        return f"{low} is faster than {high} by a factor of {factor}{opposite}"
    by = " by epoch_s, though" if ratio.is_difference else ":"
    return f"{low} and {high} are not distinguishable{by} train_s differs by a factor of {factor}"


def overlapping(comparison: Comparison) -> str:
    """Whether runs ran at the same time on the machine."""
    number = sum(run.overlapping for row in comparison.rows for run in row.runs)
    if not number:
        return ""
    runs = "1 run overlapped" if number == 1 else f"{number} runs overlapped"
    return (
        f"{runs} with another run on the same machine, and each slowed the other down: such times are not ranked. To "
        "measure, sweep without a launcher, one job after another."
    )


def first_at_target(comparison: Comparison) -> str:
    """If the aim was to reach an accuracy: which row took the least time."""
    target = comparison.target_acc
    if target is None:
        return ""
    reached = [(spread, row) for row in comparison.rows if (spread := row.seconds_to(target))]
    if not reached:
        return f"**No run whose times are compared reached {target:g}%.**"
    spread, row = min(reached, key=lambda pair: pair[0].median)
    runs = f"in {spread.n} of {len(row.runs)} runs" if len(row.runs) > 1 else "single run"
    return f"**Lowest median time to {target:g}%: {row_name(comparison, row)}, {seconds(spread.median)} s** ({runs})."
