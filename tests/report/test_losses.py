"""Equality of losses is stated of the loaders that have it; otherwise the first difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import BROKEN, LOST, SAME, Records, a, epoch, the_only, write
from vitmnist.report.losses import loss_sentences


def losses(*values: float | tuple[float, float]) -> Records:
    """Epochs with these losses, of training and evaluation."""
    pairs = [value if isinstance(value, tuple) else (value, value) for value in values]
    return [epoch(2.0, train_loss=train, eval_loss=val) for train, val in pairs]


LOSSES: dict[str, tuple[Records, list[str]]] = {
    "equal": ([a("disk", 8.0), a("ram", 2.0)], [SAME]),
    "one epoch": ([a("disk"), a("ram")], [SAME.replace("all 2 epochs", "their only epoch")]),
    "one interrupted, with equal losses so far": ([a("disk", 8.0, 8.0), a("cache", 1.0, status="interrupted")], []),
    "two equal, one interrupted": ([a("disk", 8.0), a("ram", 2.0), {**BROKEN, "epochs": losses(0.5)}], [SAME]),
    "interrupted after a difference": (
        [a("disk", epochs=losses(1.0, 0.5)), {**BROKEN, "epochs": losses(2.0)}],
        ["disk and cache with seed=42 first differ in epoch 1, in the training loss by 1."],
    ),
    "one differs from epoch 2 on": (
        [
            a(loader, epochs=losses(1.0, second, 0.25))
            for loader, second in (("cache", 0.5), ("disk", 0.75), ("ram", 0.75))
        ],
        [
            SAME.replace("2 epochs", "3 epochs"),
            "cache and disk with seed=42 first differ in epoch 2, in the training loss by 0.25.",
        ],
    ),
    "an evaluation differs, the end is the same": (
        [a("disk", epochs=losses((1.0, 0.5), 0.5)), a("ram", epochs=losses((1.0, 1.0), 0.5))],
        ["disk and ram with seed=42 first differ in epoch 1, in the evaluation loss by 0.5."],
    ),
    "repeats of one loader differ": (
        [*(a("disk", repeat=n, epochs=losses(1.0, n / 8)) for n in (1, 2)), a("ram", epochs=losses(1.0, 0.125))],
        ["Repeats of data/loader=disk with seed=42 first differ in epoch 2, in the training loss by 0.12."],
    ),
    "repeats differ where the loader is the same": (
        [a("ram", repeat=n, epochs=losses(n / 8)) for n in (1, 2)],
        ["Repeats with seed=42 first differ in epoch 1, in the training loss by 0.12."],
    ),
    "one loader has losses": ([a("disk", 2.0), a("disk", 2.0, repeat=2), LOST], []),
    "old records without losses": ([a(loader, epochs=[{"epoch_s": 1.0}]) for loader in ("disk", "ram")], []),
    "each seed has its own": (
        [a(loader, seed=seed, epochs=losses(seed, seed)) for seed in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("seed=42", "seed=1,2")],
    ),
    "no common seed": ([a("disk", 2.0, seed=1), a("ram", 2.0, seed=2)], []),
    "a trainer that decides": (
        [
            a(loader, epochs=losses(1.0 + n / 1024), trainer={"micro_batch": n, "reasons": {"micro_batch": loader}})
            for n, loader in enumerate(("disk", "ram"))
        ],
        [
            "disk and ram with seed=42 first differ in epoch 1, in the training loss by 0.00098 (trainer=auto chose "
            "micro_batch 0 and 1, which round differently)."
        ],
    ),
    "by batch size": (
        [a(loader, 2.0, batch_size=size) for size in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("seed=42", "seed=42 at batch_size=1; batch_size=2")],
    ),
}


@pytest.mark.parametrize(("records", "expected"), LOSSES.values(), ids=LOSSES)
def test_losses_are_compared_run_by_run(records: Records, expected: list[str], tmp_path: Path) -> None:
    assert loss_sentences(the_only(write(tmp_path, records))) == expected
