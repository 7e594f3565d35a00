"""Records of known content give exactly the true sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.records import BROKEN, DATASET, LOST, SAME, Records, a, compared, epoch, rounds, run, the_only, write
from vitmnist.report.summary import effect_of_loader, fastest, highest_accuracy, loss_sentences, summary

DISK, RAM = "data/loader=disk", "data/loader=ram"
FEW = "common rounds are needed to compare it with"
SINGLE = f"Lowest median: {RAM}, 2.00 s per epoch (single run). At least 6 {FEW} {DISK}."
EFFECT = "Effect of the loader on the training pass (train_s): "


def seeds(*numbers: int, **loaders: float) -> Records:
    return [a(loader, time + seed / 100, seed=seed) for seed in numbers for loader, time in loaders.items()]


def trained(loader: str, repeat: int, train_s: float, other_s: float) -> dict[str, Any]:
    second = epoch(train_s + other_s, train_s=train_s, data_wait_s=0.1, compute_s=0.1)
    return a(loader, repeat=repeat, epochs=[epoch(9.0), second])


SLOW_ROUNDS = [*rounds(6, disk=2.0, ram=1.9), *(a("disk", 0.1, repeat=number) for number in range(7, 20))]
FASTEST: dict[str, tuple[Records, str]] = {
    "one repeat": ([a("disk", 8.0), a("ram", 2.0)], SINGLE),
    "first epochs only": (
        [a("disk"), a("ram")],
        "No run can be ranked: a run must be completed, alone on the machine, and have more than one epoch.",
    ),
    "a first epoch only": (
        [a("disk", 8.0), a("ram"), BROKEN],
        f"{DISK}, 8.00 s per epoch (single run). Not ranked: {RAM} (completed, first epoch only); data/loader=cache "
        "(interrupted: SIGTERM).",
    ),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        f"Lowest median: {DISK} and {RAM}, 2.70 s per epoch (96.9% interval 2.20–3.20, n=6).",
    ),
    "within 1%": (
        rounds(6, disk=2.01, ram=2.0),
        f"Lowest median: {RAM}, 2.70 s per epoch (96.9% interval 2.20–3.20, n=6). Not distinguishable from it: {DISK}.",
    ),
    "two rounds": (
        rounds(2, disk=2.0, ram=1.0),
        f"Lowest median: {RAM}, 1.15 s per epoch (range 1.10–1.20, n=2). At least 6 {FEW} {DISK}.",
    ),
    "six rounds": (
        rounds(6, disk=2.0, ram=1.0),
        f"Fastest: {RAM}, 1.35 s per epoch (96.9% interval 1.10–1.60, n=6). In comparison, {DISK} takes 2.00 "
        "(2.00–2.00) times as long.",
    ),
    "seven rounds of four": (
        rounds(7, disk=2.0, ram=1.0, cache=1.1, gpu_slice=1.2),
        f"Lowest median: {RAM}, 1.40 s per epoch (98.4% interval 1.10–1.70, n=7). At least 8 {FEW} data/loader=cache; "
        f"data/loader=gpu_slice; {DISK}.",
    ),
    "twenty rounds": (
        rounds(20, disk=2.0, ram=1.0, cache=1.02, gpu_slice=1.0),
        f"Lowest median: {RAM} and data/loader=gpu_slice, 2.05 s per epoch (95.9% interval 1.60–2.50, n=20). In "
        f"comparison, data/loader=cache takes 1.02 (1.02–1.02) times as long; {DISK} takes 2.00 (2.00–2.00) times as "
        "long.",
    ),
    "seeds of a round are one measurement": (
        seeds(*range(6), disk=2.0, ram=1.0),
        f"Lowest median: {RAM}, 1.02 s per epoch (range 1.00–1.05, n=6). At least 6 {FEW} {DISK}.",
    ),
    "no common round": (
        [a("disk", 2.0, repeat=1), a("ram", 1.0, repeat=2)],
        f"Lowest median: {RAM}, 1.00 s per epoch (single run). At least 6 {FEW} {DISK}.",
    ),
    "slower in the rounds that both have": (
        SLOW_ROUNDS,
        f"Lowest median: {DISK}, 0.100 s per epoch (98.1% interval 0.100–2.40, n=19). In comparison, {RAM} takes 0.95 "
        "(0.95–0.95) times as long.",
    ),
}
EFFECTS: dict[str, tuple[Records, str]] = {
    "one repeat": (
        [a("disk", 8.0), a("ram", 2.0), BROKEN],
        f"{EFFECT}disk takes 4.00 (single round) times as long as ram.",
    ),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        f"{EFFECT}ram takes 1.00 (1.00–1.00, not distinguishable) times as long as disk.",
    ),
    "of the training pass": (
        [trained(loader, n, time, 1.0) for n in range(6) for loader, time in (("disk", 2.0), ("ram", 1.0))],
        f"{EFFECT}disk takes 2.00 (2.00–2.00) times as long as ram.",
    ),
    "of the training pass, not of the epoch": (
        [trained(loader, n, time, 4.0 - time) for n in range(6) for loader, time in (("disk", 2.0), ("ram", 1.0))],
        f"{EFFECT}disk takes 2.00 (2.00–2.00, not distinguishable) times as long as ram.",
    ),
    "by batch size": (
        [a(loader, time * size, batch_size=size) for size in (1, 2) for loader, time in (("disk", 2.0), ("ram", 1.0))],
        f"{EFFECT}disk takes 2.00 (single round) times as long as ram at batch_size=1; disk takes "
        "2.00 (single round) times as long as ram at batch_size=2.",
    ),
}


@pytest.mark.parametrize(("records", "expected"), FASTEST.values(), ids=FASTEST)
def test_the_fastest_is_named_only_as_certainly_as_it_is_known(records: Records, expected: str, tmp_path: Path) -> None:
    assert fastest(the_only(write(tmp_path, records))) == expected


@pytest.mark.parametrize(("records", "expected"), EFFECTS.values(), ids=EFFECTS)
def test_the_effect_of_the_loader_is_that_on_the_training_pass(records: Records, expected: str, tmp_path: Path) -> None:
    assert effect_of_loader(the_only(write(tmp_path, records))) == expected


def losses(*values: float | tuple[float, float]) -> Records:
    """Epochs with these losses, of training and evaluation."""
    pairs = [value if isinstance(value, tuple) else (value, value) for value in values]
    return [epoch(2.0, train_loss=train, eval_loss=evaluation) for train, evaluation in pairs]


LOSSES: dict[str, tuple[Records, list[str]]] = {
    "equal, and one failed": ([a("disk", 8.0), a("ram", 2.0), LOST], [SAME]),
    "one interrupted, with equal losses so far": ([a("disk", 8.0, 8.0), a("cache", 1.0, status="interrupted")], []),
    "two equal, one interrupted": ([a("disk", 8.0), a("ram", 2.0), {**BROKEN, "epochs": losses(0.5)}], [SAME]),
    "interrupted after a difference": (
        [a("disk", epochs=losses(1.0, 0.5)), {**BROKEN, "epochs": losses(2.0)}],
        ["disk and cache with seed=42 first differ in epoch 1, in the training loss by 1."],
    ),
    "one differs from epoch 2 on": (
        [a(n, epochs=losses(1.0, second, 0.25)) for n, second in (("cache", 0.5), ("disk", 0.75), ("ram", 0.75))],
        [
            SAME.replace("2 epochs", "3 epochs"),
            "cache and ram with seed=42 first differ in epoch 2, in the training loss by 0.25.",
        ],
    ),
    "only an evaluation differs": (
        [a("disk", epochs=losses((1.0, 0.5), 0.5)), a("ram", epochs=losses((1.0, 1.0), 0.5))],
        ["disk and ram with seed=42 first differ in epoch 1, in the evaluation loss by 0.5."],
    ),
    "repeats of one loader differ": (
        [*(a("disk", repeat=n, epochs=losses(1.0, n / 8)) for n in (1, 2)), a("ram", epochs=losses(1.0, 0.125))],
        ["Repeats of data/loader=disk with seed=42 first differ in epoch 2, in the training loss by 0.12."],
    ),
    "one loader has losses": ([a("disk", 2.0), a("disk", 2.0, repeat=2), LOST], []),
    "each seed has its own": (
        [a(loader, seed=seed, epochs=losses(seed, seed)) for seed in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("with seed=42", "with seed=1; with seed=2")],
    ),
    "no common seed": ([a("disk", 2.0, seed=1), a("ram", 2.0, seed=2)], []),
    "by batch size": (
        [a(loader, 2.0, batch_size=size) for size in (1, 2) for loader in ("disk", "ram")],
        [SAME.replace("seed=42", "seed=42 at batch_size=1; with seed=42 at batch_size=2")],
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
        f"{BEST}97.10% (95% interval 96.75–97.41 for 10,000 images; one seed). Within this interval: model.depth=3.",
    ),
    "six seeds": (
        accuracies(3, 70.0) + accuracies(6, *(90.25 + n / 8 for n in range(6))),
        f"{BEST}90.56% (95% interval 89.97–91.12 for 10,000 images; 90.25–90.88 over 6 seeds).",
    ),
    "unknown number of images": (
        [one for n in (3, 6) for one in accuracies(n, 90.0 + n, dataset={**DATASET, "test_size": None})],
        f"{BEST}96.00% (one seed).",
    ),
    "ties": (
        [a(name, epochs=[epoch(2.0, eval_acc=acc)]) for name, acc in (("ram", 50.0), ("disk", 50.0), ("cache", 9.0))],
        f"Highest median accuracy: {RAM}; {DISK}, 50.00% (95% interval 49.02–50.98 for 10,000 images; one seed).",
    ),
    "one configuration": (accuracies(3, 97.0, 98.0), ""),
}


@pytest.mark.parametrize(("records", "expected"), ACCURACY.values(), ids=ACCURACY)
def test_the_highest_accuracy_is_given_with_its_uncertainty(records: Records, expected: str, tmp_path: Path) -> None:
    assert highest_accuracy(the_only(write(tmp_path, records))) == expected


def test_the_summary_consists_of_these_sentences(tmp_path: Path) -> None:
    write(tmp_path, [a("disk", 8.0), a("ram", 2.0), BROKEN])
    sentences = [
        f"{SINGLE} Not ranked: data/loader=cache (interrupted: SIGTERM).",
        EFFECTS["one repeat"][1],
        SAME,
    ]
    assert summary(the_only(tmp_path)) == sentences


def test_the_ratio_of_mirrored_times_is_one(tmp_path: Path) -> None:
    mirrored = [("ram", 1, 1.0), ("ram", 2, 107.0), ("disk", 1, 107.0), ("disk", 2, 1.0)]
    write(tmp_path, [a(loader, time, repeat=repeat) for loader, repeat, time in mirrored])
    assert "takes 1.00 (2 rounds, too few to tell) times as long" in effect_of_loader(the_only(tmp_path))


def test_the_pairs_of_all_comparisons_of_a_report_count(tmp_path: Path) -> None:
    for number, record in enumerate(rounds(6, disk=2.0, ram=1.0)):
        for host in ("here", "there"):
            run(tmp_path / f"{number}-{host}", **record, environment={"host": host})
    for comparison in compared(tmp_path):
        assert "At least 7 common rounds are needed" in fastest(comparison)


def test_the_shortest_time_to_an_accuracy_is_named_if_it_was_the_objective(tmp_path: Path) -> None:
    objective = {"objective": "seconds_to_target", "target_acc": 97.0}
    slow = [epoch(1.0, eval_acc=90.0), epoch(1.0, eval_acc=97.0)]
    run(tmp_path / "0", config={"sweep": objective, "lr": 1.0}, epochs=slow)
    run(tmp_path / "1", config={"sweep": objective, "lr": 2.0}, epochs=[epoch(1.5, eval_acc=98.0)])
    run(tmp_path / "2", config={"sweep": objective, "lr": 3.0}, epochs=[epoch(0.5, eval_acc=96.0)])
    assert summary(the_only(tmp_path))[0] == "Lowest median time to 97%: lr=2.0, 1.50 s (single run)."
    run(tmp_path / "x" / "0", config={"sweep": {**objective, "target_acc": 99.0}}, epochs=slow)
    sentence = "No completed run that had the machine to itself reached 99%."
    assert summary(the_only(tmp_path / "x"))[0] == sentence
