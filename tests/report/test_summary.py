"""Records of known content give exactly the true sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import DATASET, compared, epoch, run, the_only

from vitmnist.report.accuracy import highest_accuracy
from vitmnist.report.compare import Comparison
from vitmnist.report.losses import loss_sentences
from vitmnist.report.summary import effect_of_loader, fastest, summary

Records = list[dict[str, Any]]


def a(loader: str, *times: float, repeat: int = 1, seed: int = 42, **record: Any) -> dict[str, Any]:
    """A run with a first epoch of 9 s and epochs of the given times."""
    config = {"repeat": repeat, "seed": seed, **record.pop("config", {})}
    return {"loader": loader, "times": (9.0, *times), "config": config, **record}


def rounds(number: int, **loaders: float) -> Records:
    """Rounds on a machine that slows down, by a tenth of each loader's time in each round."""
    return [
        a(loader, time * (1 + repeat / 10), repeat=repeat)
        for repeat in range(1, number + 1)
        for loader, time in loaders.items()
    ]


def losses(*values: float | tuple[float, float]) -> Records:
    """Epochs with these losses, of training and evaluation."""
    pairs = [value if isinstance(value, tuple) else (value, value) for value in values]
    return [epoch(2.0, train_loss=train, val_loss=val) for train, val in pairs]


def accuracies(depth: int, *by_seed: float, **record: Any) -> Records:
    return [
        {"epochs": [epoch(2.0, val_acc=value)], "config": {"seed": seed, "model.depth": depth}, **record}
        for seed, value in enumerate(by_seed)
    ]


BROKEN = a("cache", 1.0, status="interrupted", error="SIGTERM")
LOST = a("cache", epochs=[], status="failed", error="no memory")
DISK, RAM = "data/loader=disk", "data/loader=ram"
SINGLE = (
    f"**Lowest median: {RAM}, 2.00 s per epoch** (single run). Not enough repeats to tell it from {DISK}: repeats=6 "
    f"could. The highest median, {DISK} with 8.00 s, is 4.00 times as long (single runs)."
)
SAME = "disk and ram have the same training and evaluation losses, to the last bit, in all 2 epochs, with seed=42."
FEW = " Without an interval the runs are too few to tell a factor from 1."


def seconds_by_seed(*seeds: int, **loaders: float) -> Records:
    return [a(loader, time + seed / 100, seed=seed) for seed in seeds for loader, time in loaders.items()]


FASTEST: dict[str, tuple[Records, str]] = {
    "one repeat": ([a("disk", 8.0), a("ram", 2.0)], SINGLE),
    "failed before an epoch": ([a("disk", 8.0), LOST], f"**{DISK}, 8.00 s per epoch** (single run)."),
    "interrupted": ([a("disk", 8.0), BROKEN], f"**{DISK}, 8.00 s per epoch** (single run)."),
    "one run": ([a("disk", 8.0)], "**8.00 s per epoch** (single run)."),
    "first epochs only": (
        [a("disk"), a("ram")],
        "Nothing is ranked: no run completed, had the machine to itself, and has an epoch after its first.",
    ),
    "a first epoch only": ([a("disk", 8.0), a("ram")], f"**{DISK}, 8.00 s per epoch** (single run)."),
    "no epoch": ([LOST], "No run has recorded the time of an epoch, so there is nothing to compare yet."),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        f"**Lowest median: {DISK}, 2.70 s per epoch** (96.9% interval 2.20–3.20, n=6). Within noise of it: {RAM}.",
    ),
    "two rounds": (
        rounds(2, disk=2.0, ram=1.0),
        f"**Lowest median: {RAM}, 1.15 s per epoch** (range 1.10–1.20, n=2). Not enough repeats to tell it from "
        f"{DISK}: repeats=6 could. The highest median, {DISK} with 2.30 s, is 2.00 times as long (medians of 2 runs).",
    ),
    "six rounds": (
        rounds(6, disk=2.0, ram=1.0),
        f"**Fastest: {RAM}, 1.35 s per epoch** (96.9% interval 1.10–1.60, n=6). By epoch_s it is faster than {DISK} by "
        "a factor of 2.00 (2.00–2.00, 96.9%).",
    ),
    "seven rounds of four": (
        rounds(7, disk=2.0, ram=1.0, cache=1.1, gpu_slice=1.2),
        f"**Lowest median: {RAM}, 1.40 s per epoch** (98.4% interval 1.10–1.70, n=7). Not enough repeats to tell it "
        f"from any other: repeats=8 could. The highest median, {DISK} with 2.80 s, is 2.00 times as long (medians of 7 "
        "runs).",
    ),
    "twenty rounds": (
        rounds(20, disk=2.0, ram=1.0, cache=1.02, gpu_slice=1.0),
        f"**Lowest median: {RAM}, 2.05 s per epoch** (95.9% interval 1.60–2.50, n=20). By epoch_s it is faster than "
        f"data/loader=cache by a factor of 1.02 (1.02–1.02, 99.7%); than {DISK} by a factor of 2.00 (2.00–2.00, "
        "99.7%). Within noise of it: data/loader=gpu_slice.",
    ),
    "seeds are repeats": (
        seconds_by_seed(0, 1, 2, disk=2.0, ram=1.0),
        f"**Lowest median: {RAM}, 1.01 s per epoch** (range 1.00–1.02, n=3). Not enough repeats to tell it from "
        f"{DISK}: repeats=2 could. The highest median, {DISK} with 2.01 s, is 1.99 times as long (medians of 3 runs).",
    ),
    "six seeds in one round": (
        seconds_by_seed(*range(6), disk=2.0, ram=1.0),
        f"**Fastest: {RAM}, 1.02 s per epoch** (96.9% interval 1.00–1.05, n=6). By epoch_s it is faster than {DISK} by "
        "a factor of 1.98 (1.95–2.00, 96.9%). All runs are of one round, where a drift of the machine looks like a "
        "difference.",
    ),
    "no pairs": (
        [a("disk", 2.0, seed=1), a("ram", 1.0, seed=2)],
        f"**Lowest median: {RAM}, 1.00 s per epoch** (single run). Without a common seed and round, and so not "
        f"compared with it: {DISK}.",
    ),
    "slow rounds for the faster": (
        [*rounds(6, disk=2.0, ram=1.9), *(a("disk", 0.1, repeat=number) for number in range(7, 20))],
        f"**Lowest median: {DISK}, 0.100 s per epoch** (98.1% interval 0.100–2.40, n=19). By epoch_s it is slower than "
        f"{RAM} by a factor of 1.05 (1.05–1.05, 96.9%).",
    ),
}
EFFECT: dict[str, tuple[Records, str]] = {
    "one repeat": (
        [a("disk", 8.0), a("ram", 2.0)],
        f"Effect of the loader on the training pass (train_s): disk took 4.00 times as long as ram (single runs).{FEW}",
    ),
    "interrupted": ([a("disk", 8.0), BROKEN], ""),
    "a first epoch only": ([a("disk", 8.0), a("ram")], ""),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        "Effect of the loader on the training pass (train_s): disk and ram are within noise of each other (factor "
        "1.00, 1.00–1.00, 96.9%).",
    ),
    "of training alone": (
        [
            a(
                loader,
                repeat=repeat,
                epochs=[epoch(9.0), epoch(time + 1.0, train_s=time, data_wait_s=0.1, compute_s=0.1)],
            )
            for repeat in range(6)
            for loader, time in (("disk", 2.0), ("ram", 1.0))
        ],
        "Effect of the loader on the training pass (train_s): ram is faster than disk by a factor of 2.00 (2.00–2.00, "
        "96.9%).",
    ),
    "by batch size": (
        [a(loader, time * size, batch_size=size) for size in (1, 2) for loader, time in (("disk", 2.0), ("ram", 1.0))],
        "Effect of the loader on the training pass (train_s): disk took 2.00 times as long as ram (single runs) at "
        f"batch_size=1; disk took 2.00 times as long as ram (single runs) at batch_size=2.{FEW}",
    ),
    "workers of one loader": (
        [a("disk", 2.0 + n, config={"data.loader.num_workers": n}) for n in (0, 2)],
        "",
    ),
}
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
        [
            "Repeats of disk with seed=42 first differ in epoch 2, in the training loss by 0.12: its losses are not "
            "compared with others."
        ],
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
ACCURACY: dict[str, tuple[Records, str]] = {
    "one seed": (
        accuracies(3, 97.0) + accuracies(6, 97.1) + accuracies(9, 90.0),
        "Highest median accuracy: model.depth=6, 97.10% (95% interval 96.75–97.41 of 10,000 images; one seed). Within "
        "its uncertainty: model.depth=3. Not enough seeds to tell it from model.depth=9: 7 could.",
    ),
    "six seeds, always higher": (
        accuracies(3, *(90 + n / 8 for n in range(6))) + accuracies(6, *(90.25 + n / 8 for n in range(6))),
        "Highest median accuracy: model.depth=6, 90.56% (95% interval 89.97–91.12 of 10,000 images; 90.25–90.88 over 6 "
        "seeds). With the same seeds it is above model.depth=3 by 0.25 to 0.25 points (96.9%).",
    ),
    "six seeds, once lower": (
        accuracies(3, 90.0, *[90.0] * 5) + accuracies(6, 89.0, *[91.0] * 5),
        "Highest median accuracy: model.depth=6, 91.00% (95% interval 90.42–91.55 of 10,000 images; 89.00–91.00 over 6 "
        "seeds). Within its uncertainty: model.depth=3.",
    ),
    "unknown number of images": (
        [one for n in (3, 6) for one in accuracies(n, 90.0 + n, dataset={**DATASET, "test_size": None})],
        "Highest median accuracy: model.depth=6, 96.00% (number of evaluated images unknown, so no interval; one "
        "seed). Not enough seeds to tell it from model.depth=3: 6 could.",
    ),
    "the same with each loader": (
        [
            {"loader": loader, "batch_size": size, "epochs": [epoch(2.0, val_acc=size / 4)]}
            for loader in ("ram", "disk")
            for size in (100, 200)
        ],
        "Highest median accuracy: batch_size=200, 50.00% (95% interval 49.02–50.98 of 10,000 images; one seed). Not "
        "enough seeds to tell it from batch_size=100: 8 could.",
    ),
    "one configuration": (accuracies(3, 97.0, 98.0), ""),
}
TABLES: list[tuple[Callable[[Comparison], Any], dict[str, tuple[Records, Any]]]] = [
    (fastest, FASTEST),
    (effect_of_loader, EFFECT),
    (loss_sentences, LOSSES),
    (highest_accuracy, ACCURACY),
]


@pytest.mark.parametrize(
    ("sentence", "records", "expected"),
    [
        pytest.param(sentence, *case, id=f"{sentence.__name__}: {name}")
        for sentence, cases in TABLES
        for name, case in cases.items()
    ],
)
def test_sentences_are_true(
    sentence: Callable[[Comparison], Any], records: Records, expected: Any, tmp_path: Path
) -> None:
    for number, record in enumerate(records):
        run(tmp_path / str(number), **record)
    assert sentence(the_only(tmp_path)) == expected


def test_a_summary_has_these_sentences_and_no_others(tmp_path: Path) -> None:
    for number, record in enumerate([a("disk", 8.0), a("ram", 2.0), BROKEN]):
        run(tmp_path / str(number), **record)
    told = [SINGLE, EFFECT["one repeat"][1], SAME]
    assert summary(the_only(tmp_path)) == told


def test_machines_are_summarised_apart(tmp_path: Path) -> None:
    """Pairs of all of them count: a report with two comparisons of two rows has two pairs to be wrong about."""
    for number, record in enumerate(rounds(6, disk=2.0, ram=1.0)):
        for host in ("here", "there"):
            run(tmp_path / f"{number}-{host}", **record, environment={"host": host})
    for comparison in compared(tmp_path):
        assert "repeats=7 could" in fastest(comparison)


def test_a_resumed_run_is_compared_without_the_first_epoch_of_each_start(tmp_path: Path) -> None:
    ends = [epoch(time, ended_at=end) for time, end in ((9.0, 10.0), (2.0, 12.0), (8.0, 110.0), (2.0, 112.0))]
    folder = run(tmp_path / "0", epochs=ends, began_at=100.0, ended_at=112.0)
    (folder / "resumed.yaml").touch()
    assert fastest(the_only(tmp_path)) == "**2.00 s per epoch** (single run)."


def test_a_search_for_the_shortest_time_to_an_accuracy_says_which_it_is(tmp_path: Path) -> None:
    aim = {"objective": "seconds_to_target", "target_acc": 97.0}
    slow = [epoch(1.0, val_acc=90.0), epoch(1.0, val_acc=97.0)]
    run(tmp_path / "0", config={"sweep": aim, "lr": 1.0}, epochs=slow)
    run(tmp_path / "1", config={"sweep": aim, "lr": 2.0}, epochs=[epoch(1.5, val_acc=98.0)])
    run(tmp_path / "2", config={"sweep": aim, "lr": 3.0}, epochs=[epoch(0.5, val_acc=96.0)])
    assert summary(the_only(tmp_path))[0] == "**Lowest median time to 97%: lr=2.0, 1.50 s** (single run)."
    run(tmp_path / "x" / "0", config={"sweep": {**aim, "target_acc": 99.0}}, epochs=slow)
    assert summary(the_only(tmp_path / "x"))[0] == "**No completed run reached 99%.**"


def test_shards_are_named(tmp_path: Path) -> None:
    run(tmp_path / "0")
    run(tmp_path / "1", distributed={"ranks": 2, "placement": "shard"})
    assert "With placement=shard each process shuffles its own part of the set" in " ".join(summary(the_only(tmp_path)))
