"""Records of known content give exactly the true sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.records import BROKEN, LOST, SAME, Records, a, epoch, rounds, the_only, write
from vitmnist.report.summary import fastest, highest_accuracy, loss_sentences, summary

UNSURE = "Whether the loader matters takes 3 rounds to tell (repeats=3): ram has the lowest median"
SINGLE = f"{UNSURE}, 2.00 s per epoch (single run). Relative to it: disk 4.00 (single round)."
THREE = "1.20 s per epoch (range 1.10–1.30, n=3). Relative to it:"
SLOW_ROUNDS = [*rounds(6, disk=2.0, ram=1.9), *(a("disk", 0.1, repeat=number) for number in range(7, 20))]
FASTEST: dict[str, tuple[Records, list[str]]] = {
    "one repeat": ([a("disk", 8.0), a("ram", 2.0)], [SINGLE]),
    "first epochs only": (
        [a("disk"), a("ram")],
        ["No run can be ranked: a run must be completed, alone on the machine, and have a second epoch."],
    ),
    "equal": (
        rounds(3, disk=2.01, ram=2.0),
        [
            "No difference between loaders is distinguishable from noise: ram has the lowest median, 2.40 s per epoch "
            "(range 2.20–2.60, n=3). Relative to it: disk 1.00 (1.00–1.01, not distinguishable).",
        ],
    ),
    "options of a loader, whose keys are named once": (
        [
            a("disk", 4.0 - workers, repeat=n, config={"data.loader.num_workers": workers})
            for n in range(3)
            for workers in (0, 1, 2)
        ]
        + [a("ram", 1.0, repeat=n) for n in range(3)],
        [
            "The loader matters: ram is the fastest, 1.00 s per epoch (range 1.00–1.00, n=3). Relative to it: "
            "disk (num_workers=2) 2.00 (2.00–2.00), disk (1) 3.00 (3.00–3.00), disk (0) 4.00 (4.00–4.00)."
        ],
    ),
    "three rounds of four": (
        rounds(3, disk=2.0, ram=1.0, cache=1.005, gpu_slice=1.2),
        [
            f"The loader matters: ram has the lowest median, {THREE} cache 1.00 (1.00–1.01, not distinguishable), "
            "gpu_slice 1.20 (1.20–1.20), disk 2.00 (2.00–2.00)."
        ],
    ),
    "the others differ": (  # from each other; the lowest median is noisy
        [
            a(loader, time, repeat=n)
            for n, noisy in enumerate((0.5, 0.9, 1.7))
            for loader, time in (("disk", 3.2), ("ram", 1.0), ("cache", noisy))
        ],
        [
            "The loader matters: cache has the lowest median, 0.900 s per epoch (range 0.500–1.70, n=3). Relative to "
            "it: ram 1.09 (0.26–4.68, not distinguishable), disk 3.50 (0.82–14.98, not distinguishable)."
        ],
    ),
    "seeds of a round are one measurement": (
        [
            a(loader, time + seed / 100, seed=seed)
            for seed in range(6)
            for loader, time in (("disk", 2.0), ("ram", 1.0))
        ],
        [f"{UNSURE}, 1.02 s per epoch (range 1.00–1.05, n=6). Relative to it: disk 1.98 (single round)."],
    ),
    "slower in the rounds that both have": (
        SLOW_ROUNDS,
        [
            "The loader matters: disk has the lowest median, 0.100 s per epoch (range 0.100–3.20, n=19). Relative to "
            "it: ram 0.95 (0.95–0.95)."
        ],
    ),
    "by batch size": (
        [
            a(loader, time * size, batch_size=size, repeat=n)
            for n in range(3)
            for size in (1, 2)
            for loader, time in (("disk", 2.0), ("ram", 1.0))
        ],
        [
            "The loader matters at batch_size=1: ram is the fastest, 1.00 s per epoch (range 1.00–1.00, n=3). Relative "
            "to it: disk 2.00 (2.00–2.00).",
            "The loader matters at batch_size=2: ram is the fastest, 2.00 s per epoch (range 2.00–2.00, n=3). Relative "
            "to it: disk 2.00 (2.00–2.00).",
            "The configuration matters: batch_size=1 data/loader=ram is the fastest, 1.00 s per epoch (range "
            "1.00–1.00, n=3). Relative to it: 2.00 (2.00–2.00) to 4.00 (4.00–4.00).",
        ],
    ),
}


@pytest.mark.parametrize(("records", "expected"), FASTEST.values(), ids=FASTEST)
def test_the_answer_is_given_only_as_certainly_as_it_is_known(
    records: Records, expected: list[str], tmp_path: Path
) -> None:
    assert fastest(the_only(write(tmp_path, records))) == expected


def losses(*values: float | tuple[float, float]) -> Records:
    """Epochs with these losses, of training and evaluation."""
    pairs = [value if isinstance(value, tuple) else (value, value) for value in values]
    return [epoch(2.0, train_loss=train, eval_loss=evaluation) for train, evaluation in pairs]


LOSSES: dict[str, tuple[Records, list[str]]] = {
    "equal, and one failed": ([a("disk", 8.0), a("ram", 2.0), LOST], [SAME]),
    "interrupted after a difference": (
        [a("disk", epochs=losses(1.0, 0.5)), {**BROKEN, "epochs": losses(2.0)}],
        ["disk and cache first differ in epoch 1, in the training loss by 1, with seed=42."],
    ),
    "one differs from epoch 2 on": (
        [a(n, epochs=losses(1.0, second, 0.25)) for n, second in (("cache", 0.5), ("disk", 0.75), ("ram", 0.75))],
        ["cache and ram first differ in epoch 2, in the training loss by 0.25, with seed=42."],
    ),
    "repeats of one loader differ": (
        [*(a("disk", repeat=n, epochs=losses(1.0, n / 8)) for n in (1, 2)), a("ram", epochs=losses(1.0, 0.125))],
        ["Rounds of disk first differ in epoch 2, in the training loss by 0.12, with seed=42."],
    ),
    "each seed has its own": (
        [a(loader, seed=seed, epochs=losses(seed, seed)) for seed in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("with seed=42", "with seed=1, and in 1 more group")],
    ),
    "no common seed": ([a("disk", 2.0, seed=1), a("ram", 2.0, seed=2)], []),
    "by batch size": (
        [a(loader, 2.0, batch_size=size) for size in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("seed=42", "seed=42 at batch_size=1, and in 1 more group")],
    ),
}


@pytest.mark.parametrize(("records", "expected"), LOSSES.values(), ids=LOSSES)
def test_equality_of_losses_is_stated_only_where_it_holds(
    records: Records, expected: list[str], tmp_path: Path
) -> None:
    assert loss_sentences(the_only(write(tmp_path, records))) == expected


def accuracies(depth: int, *by_seed: float, **record: Any) -> Records:
    return [
        {"epochs": [epoch(2.0, eval_acc=value)], "config": {"seed": seed, "model.depth": depth}, **record}
        for seed, value in enumerate(by_seed)
    ]


BEST = "Highest median accuracy: model.depth=6, "
ACCURACY: dict[str, tuple[Records, str]] = {
    "one seed": (
        accuracies(3, 97.0) + accuracies(6, 97.1) + accuracies(9, 90.0),
        f"{BEST}97.10% (95% interval 96.75–97.41 for 10,000 images; one seed).",
    ),
    "six seeds": (
        accuracies(3, 70.0) + accuracies(6, *(90.25 + n / 8 for n in range(6))),
        f"{BEST}90.56% (95% interval 89.97–91.12 for 10,000 images; 90.25–90.88 over 6 seeds).",
    ),
    "one configuration": (accuracies(3, 97.0, 98.0), ""),
    "one that ended, and one that did not": (accuracies(3, 97.0) + accuracies(6, 97.0, status="failed"), ""),
    "all equal": (
        [a(loader, 2.0, seed=seed) for loader in ("disk", "ram", "cache") for seed in (1, 2)],
        "The same median accuracy: 3 of 3 configurations, 90.00% (95% interval 89.40–90.57 for 10,000 images; "
        "90.00–90.00 over 2 seeds).",
    ),
    "all equal that ended": (
        [a("disk", 8.0), a("ram", 2.0), BROKEN],
        "The same median accuracy: 2 of 3 configurations, 90.00% (95% interval 89.40–90.57 for 10,000 "
        "images; one seed).",
    ),
    "equal with each loader": (
        [
            {"loader": loader, "batch_size": size, "epochs": [epoch(2.0, eval_acc=accuracy)]}
            for size, accuracy in ((50, 97.1), (500, 96.0))
            for loader in ("disk", "ram")
        ],
        "Highest median accuracy: 2 of 4 configurations (batch_size=50), 97.10% (95% interval 96.75–97.41 for 10,000 "
        "images; one seed).",
    ),
    "equal by chance": (
        [
            {"loader": loader, "batch_size": size, "epochs": [epoch(2.0, eval_acc=accuracy)]}
            for loader, size, accuracy in (("disk", 50, 97.1), ("ram", 500, 97.1), ("cache", 50, 96.0))
        ],
        "Highest median accuracy: 2 of 3 configurations, 97.10% (95% interval 96.75–97.41 for 10,000 "
        "images; one seed).",
    ),
}


@pytest.mark.parametrize(("records", "expected"), ACCURACY.values(), ids=ACCURACY)
def test_the_highest_accuracy_is_given_with_its_uncertainty(records: Records, expected: str, tmp_path: Path) -> None:
    assert highest_accuracy(the_only(write(tmp_path, records))) == expected


def test_the_summary_consists_of_these_sentences(tmp_path: Path) -> None:
    write(tmp_path, [a("disk", 8.0), a("ram", 2.0), BROKEN])
    assert summary(the_only(tmp_path)) == [
        SINGLE,
        "Not ranked, for the reason in the column status: 1 of 3 rows.",
        SAME,
        ACCURACY["all equal that ended"][1],
    ]
