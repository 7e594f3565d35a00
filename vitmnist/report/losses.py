"""Whether loaders led to the same losses, as they promise: they deliver the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from vitmnist.report.compare import LOADER, Comparison, Configuration
from vitmnist.report.runs import Run
from vitmnist.report.text import row_name, where

LOSSES = {"train_loss": "training loss", "eval_loss": "evaluation loss"}

Losses = tuple[tuple[float, ...], ...]  # of each epoch, in the order of LOSSES


def loss_sentences(comparison: Comparison) -> list[str]:
    """Which loaders have equal losses, and the first difference where some are not.

    Loaders are compared with all else the same, seed included. Equality is stated of runs that completed.
    """
    sentences = []
    differing = set()
    for row in comparison.rows:
        for seed in dict.fromkeys(run.seed for run in row.runs):
            if found := _first_difference([run for run in row.runs if run.seed == seed]):
                differing.add((id(row), seed))
                name = row_name(comparison, row)
                sentences.append(f"Repeats{' of ' if name else ''}{name} with seed={seed} {found[0]}.")
    equal: dict[tuple[tuple[str, ...], int], dict[str, list[str]]] = {}
    for shared, rows in comparison.loader_groups().items():
        for seed in dict.fromkeys(run.seed for row in rows for run in row.runs):
            place = where(shared)
            told = f"{f' at {place}' if place else ''} with seed={seed}"
            runs = [
                (row, max(repeats, key=lambda run: len(losses_of(run))))
                for row in rows
                if (repeats := [run for run in row.runs if run.seed == seed and losses_of(run)])
                and (id(row), seed) not in differing  # its repeats differ already
            ]
            sentences += _difference(comparison, runs, told)
            for loaders, epochs in _equal(comparison, runs):
                equal.setdefault((loaders, epochs), {}).setdefault(place, []).append(seed)
    return [_equality(*key, places) for key, places in equal.items()] + sentences


def losses_of(run: Run) -> Losses:
    """The losses of its epochs, up to the first that is not recorded."""
    found: list[tuple[float, ...]] = []
    for epoch in run.epochs:
        if any(epoch.get(key) is None for key in LOSSES):
            break
        found.append(tuple(epoch[key] for key in LOSSES))
    return tuple(found)


def _first_difference(runs: Sequence[Run]) -> tuple[str, tuple[Run, Run]] | None:
    """The earliest epoch in which two of the runs differ, in words, and the two."""
    found: list[tuple[int, int, float, tuple[Run, Run]]] = []
    for pair in combinations(runs, 2):
        differences = (
            (number, kind, abs(one - other), pair)
            for number, losses in enumerate(zip(*map(losses_of, pair), strict=False), 1)
            for kind, (one, other) in enumerate(zip(*losses, strict=True))
            if one != other
        )
        found += [first] if (first := next(differences, None)) else []
    if not found:
        return None
    number, kind, size, pair = min(found, key=lambda entry: entry[:2])
    return f"first differ in epoch {number}, in the {list(LOSSES.values())[kind]} by {size:.2g}{_rounding(*pair)}", pair


def _rounding(one: Run, other: Run) -> str:
    """Settings of the trainer that each of two runs chose for itself, and that change rounding."""
    chosen = [{**(run.result.get("trainer") or {}), "reasons": None} for run in (one, other)]
    keys = [key for key in chosen[0] if chosen[0][key] != chosen[1].get(key)]
    settings = ", ".join(f"{key} {chosen[0][key]} and {chosen[1].get(key)}" for key in keys)
    return f" (trainer=auto chose {settings}, which round differently)" if keys else ""


def _difference(comparison: Comparison, runs: Sequence[tuple[Configuration, Run]], told: str) -> Iterator[str]:
    found = _first_difference([run for _, run in runs])
    if found and len({comparison.value(row, LOADER) for row, _ in runs}) > 1:
        one, other = (comparison.loader_label(row) for run in found[1] for row, its in runs if its is run)
        yield f"{one} and {other}{told} {found[0]}."


def _equal(comparison: Comparison, runs: Sequence[tuple[Configuration, Run]]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Loaders, at least two, whose completed runs have the same losses in all epochs, and how many epochs."""
    classes: dict[Losses, list[Configuration]] = {}
    for row, run in runs:
        if run.status == "completed" and len(losses_of(run)) == len(run.epochs):
            classes.setdefault(losses_of(run), []).append(row)
    for losses, rows in classes.items():
        if len({comparison.value(row, LOADER) for row in rows}) > 1:
            yield tuple(comparison.loader_label(row) for row in rows), len(losses)


def _equality(loaders: tuple[str, ...], epochs: int, places: dict[str, list[str]]) -> str:
    by_seeds: dict[str, list[str]] = {}
    for place, seeds in places.items():
        by_seeds.setdefault(",".join(seeds), []).append(place)
    told = [f"seed={seeds}{' at ' if any(at) else ''}{'; '.join(at)}" for seeds, at in by_seeds.items()]
    return (
        f"{', '.join(loaders[:-1])} and {loaders[-1]} have the same training and evaluation losses, to the last bit, "
        f"in {f'all {epochs} epochs' if epochs > 1 else 'their only epoch'}, with {', and with '.join(told)}."
    )
