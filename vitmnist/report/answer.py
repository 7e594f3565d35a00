"""The answer in sentences: what is fastest, by how much, what the loader is worth, and whether all learnt the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vitmnist.report.compare import Cell, Comparison, Spread, as_text
from vitmnist.report.table import seconds


def answer(comparison: Comparison) -> list[str]:
    """Sentences; a part in `**` is what to remember."""
    measured = comparison.measured
    if not measured:
        return ["No run has finished an epoch, so there is nothing to compare yet."]
    return [
        sentence
        for sentence in (
            _first_at_target(comparison),
            _fastest(comparison, [cell for cell in measured if not cell.disturbed]),
            _disturbed(comparison),
            _worth_of_loader(comparison),
            _learnt_the_same(comparison),
            _sharded(comparison),
            _most_accurate(comparison),
        )
        if sentence
    ]


def named(comparison: Comparison, cell: Cell) -> str:
    """A cell as one would type it."""
    return " ".join(f"{column}={as_text(value)}" for column, value in zip(comparison.columns, cell.values, strict=True))


def _time(cell: Cell) -> Spread:
    assert cell.epoch_s is not None
    return cell.epoch_s


def _fastest(comparison: Comparison, measured: list[Cell]) -> str:
    if not measured:
        return ""
    best, slowest = measured[0], measured[-1]
    time = _time(best)
    spread = f" ({seconds(time.low)}–{seconds(time.high)})" if time.high > time.low else ""
    if len(measured) == 1:
        return f"**{seconds(time.median)} s an epoch**{spread}."
    ratio = _time(slowest).median / time.median
    once = " Each was run once, and a drift of the machine would look like a difference; repeats=3 makes rounds."
    doubt = "" if comparison.repeated else once
    equal = "; ".join(named(comparison, cell) for cell in measured[1:] if _time(cell).overlaps(time))
    return (
        f"**Fastest: {named(comparison, best)}, {seconds(time.median)} s an epoch**{spread}, {ratio:.2f} times as fast "
        f"as {named(comparison, slowest)} ({seconds(_time(slowest).median)} s)."
        + (f" Not to be told apart from it: {equal}." if equal else "")
        + doubt
    )


def _disturbed(comparison: Comparison) -> str:
    """Whether jobs ran at the same time on the machine."""
    if not comparison.disturbed:
        return ""
    return (
        f"{comparison.disturbed} runs were at work while another was on the same machine, and each took from the other "
        "what it measures: these times count for nothing. To measure, sweep without a launcher, one job after another."
    )


def _sharded(comparison: Comparison) -> str:
    if not comparison.sharded:
        return ""
    return (
        "With placement=shard the set is shuffled within the part of each process: the batches are not those of the "
        "other runs, and depend on the number of processes."
    )


def _first_at_target(comparison: Comparison) -> str:
    """Where the aim was to reach an accuracy: which was the first."""
    target = comparison.target_acc
    if target is None:
        return ""
    reached = {cell: spread.median for cell in comparison.cells if (spread := cell.seconds_to(target))}
    if not reached:
        return f"**No run reached {target:g}%.**"
    first = min(reached, key=lambda cell: reached[cell])
    return f"**First at {target:g}%: {named(comparison, first)}, after {seconds(reached[first])} s.**"


def _beside_each_other(comparison: Comparison) -> dict[Hashable, list[Cell]]:
    """Cells that differ in the loader alone, by all that they share."""
    if "data/loader" not in comparison.columns:
        return {}
    place = comparison.columns.index("data/loader")
    # A key of one loader alone is no difference of the others.
    shared = [
        index
        for index, column in enumerate(comparison.columns)
        if index != place and not column.startswith("data.loader.")
    ]
    groups: dict[Hashable, list[Cell]] = {}
    for cell in comparison.cells:
        groups.setdefault(tuple((comparison.columns[index], cell.values[index]) for index in shared), []).append(cell)
    return {group: cells for group, cells in groups.items() if len({cell.values[place] for cell in cells}) > 1}


def _worth_of_loader(comparison: Comparison) -> str:
    parts = []
    for shared, cells in _beside_each_other(comparison).items():
        alone = (cell for cell in cells if cell.epoch_s and not cell.disturbed)
        times = sorted(alone, key=lambda cell: _time(cell).median)
        if len(times) > 1:
            best, worst = times[0], times[-1]
            doubt = ", though they cannot be told apart" if _time(best).overlaps(_time(worst)) else ""
            parts.append(
                f"{_time(worst).median / _time(best).median:.2f}{_where(shared)} "
                f"({comparison.value(best, 'data/loader')} over {comparison.value(worst, 'data/loader')}{doubt})"
            )
    return f"The choice of the loader is worth a factor of {'; '.join(parts)}." if parts else ""


def _where(shared: Any) -> str:
    return f" at {' '.join(f'{column}={value}' for column, value in shared)}" if shared else ""


def _learnt_the_same(comparison: Comparison) -> str:
    """Whether runs that differ in the loader alone have the same losses, as the loaders promise."""
    differing, compared = [], 0
    decided: set[tuple[Any, ...]] = set()
    for shared, cells in _beside_each_other(comparison).items():
        losses: dict[tuple[Any, ...], None] = {}
        runs = [run for cell in cells for run in cell.runs if run.epochs]
        epochs = min((len(run.epochs) for run in runs), default=0)
        for run in runs:
            losses[tuple((epoch["train_loss"], epoch["val_loss"]) for epoch in run.epochs[:epochs])] = None
            trainer = run.result.get("trainer") or {}
            decided.add(tuple(str(value) for key, value in sorted(trainer.items()) if key != "reasons"))
        compared += len(runs) > 1
        if len(losses) > 1:
            first = [row[-1][0] for row in losses]
            differing.append(f"{max(first) - min(first):.2g}{_where(shared)}")
    if not compared:
        return ""
    if differing:
        why = ": each job decided anew what trainer=auto means, and rounds otherwise" if len(decided) > 1 else ""
        return f"The training losses of the loaders differ by up to {', '.join(differing)}{why}."
    return "Every loader ended in the same losses, to the last bit: they delivered the same batches."


def _most_accurate(comparison: Comparison) -> str:
    """The cells with the highest accuracy, where it is not the same for all."""
    accuracies = {cell: cell.val_acc.median for cell in comparison.cells if cell.val_acc}
    if len(set(accuracies.values())) < 2:
        return ""
    best = max(accuracies.values())
    names = [named(comparison, cell) for cell, accuracy in accuracies.items() if accuracy == best]
    for shared, cells in _beside_each_other(comparison).items():
        if {accuracies.get(cell) for cell in cells} == {best}:  # the loader makes no difference
            whole = [named(comparison, cell) for cell in cells]
            names = [_where(shared).removeprefix(" at "), *(name for name in names if name not in whole)]
    return f"Highest accuracy: {'; '.join(names)}, {best:.2f}%."
