"""Records of known content give exactly the true sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import BROKEN, LOST, SAME, Records, a, compared, epoch, rounds, run, the_only, write
from vitmnist.report.summary import effect_of_loader, fastest, summary

DISK, RAM = "data/loader=disk", "data/loader=ram"
SINGLE = (
    f"**Lowest median: {RAM}, 2.00 s per epoch** (single run). Not enough repeats to tell it from {DISK}: 6 rounds "
    f"in common are needed. The highest median, {DISK} with 8.00 s, is 4.00 times as long (a single round)."
)
FEW = " A factor without an interval may be chance."


def seconds_by_seed(*seeds: int, **loaders: float) -> Records:
    return [a(loader, time + seed / 100, seed=seed) for seed in seeds for loader, time in loaders.items()]


FASTEST: dict[str, tuple[Records, str]] = {
    "one repeat": ([a("disk", 8.0), a("ram", 2.0)], SINGLE),
    "failed before an epoch": (
        [a("disk", 8.0), LOST],
        f"**{DISK}, 8.00 s per epoch** (single run). Not ranked: data/loader=cache (failed).",
    ),
    "interrupted": (
        [a("disk", 8.0), BROKEN],
        f"**{DISK}, 8.00 s per epoch** (single run). Not ranked: data/loader=cache (interrupted).",
    ),
    "one run": ([a("disk", 8.0)], "**8.00 s per epoch** (single run)."),
    "first epochs only": (
        [a("disk"), a("ram")],
        "Nothing is ranked: no run completed, had the machine to itself, and has an epoch after its first.",
    ),
    "a first epoch only": (
        [a("disk", 8.0), a("ram")],
        f"**{DISK}, 8.00 s per epoch** (single run). Not ranked: {RAM} (first epoch only).",
    ),
    "no epoch": ([LOST], "No run has recorded the time of an epoch, so there is nothing to compare yet."),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        f"**Lowest median: {DISK} and {RAM}, 2.70 s per epoch** (96.9% interval 2.20–3.20, n=6).",
    ),
    "within 1%": (
        rounds(6, disk=2.01, ram=2.0),
        f"**Lowest median: {RAM}, 2.70 s per epoch** (96.9% interval 2.20–3.20, n=6). Not distinguishable from it: "
        f"{DISK}.",
    ),
    "two rounds": (
        rounds(2, disk=2.0, ram=1.0),
        f"**Lowest median: {RAM}, 1.15 s per epoch** (range 1.10–1.20, n=2). Not enough repeats to tell it from "
        f"{DISK}: 6 rounds in common are needed. The highest median, {DISK} with 2.30 s, is 2.00 times as long (the "
        "median of 2 rounds).",
    ),
    "six rounds": (
        rounds(6, disk=2.0, ram=1.0),
        f"**Fastest: {RAM}, 1.35 s per epoch** (96.9% interval 1.10–1.60, n=6). By epoch_s it is faster than {DISK} by "
        "a factor of 2.00 (2.00–2.00, 96.9%).",
    ),
    "seven rounds of four": (
        rounds(7, disk=2.0, ram=1.0, cache=1.1, gpu_slice=1.2),
        f"**Lowest median: {RAM}, 1.40 s per epoch** (98.4% interval 1.10–1.70, n=7). Not enough repeats to tell it "
        f"from any other: 8 rounds in common are needed. The highest median, {DISK} with 2.80 s, is 2.00 times as long "
        "(the median of 7 rounds).",
    ),
    "twenty rounds": (
        rounds(20, disk=2.0, ram=1.0, cache=1.02, gpu_slice=1.0),
        f"**Lowest median: {RAM} and data/loader=gpu_slice, 2.05 s per epoch** (95.9% interval 1.60–2.50, n=20). By "
        "epoch_s it is faster than data/loader=cache by a factor of 1.02 (1.02–1.02, 99.7%); than "
        f"{DISK} by a factor of 2.00 (2.00–2.00, 99.7%).",
    ),
    "seeds of a round share what slowed it down": (
        seconds_by_seed(*range(6), disk=2.0, ram=1.0),
        f"**Lowest median: {RAM}, 1.02 s per epoch** (range 1.00–1.05, n=6). Not enough repeats to tell it from "
        f"{DISK}: 6 rounds in common are needed. The highest median, {DISK} with 2.02 s, is 1.98 times as long (a "
        "single round).",
    ),
    "two seeds in six rounds": (
        [{**one, "config": {**one["config"], "seed": seed}} for one in rounds(6, disk=2.0, ram=1.0) for seed in (1, 2)],
        f"**Fastest: {RAM}, 1.35 s per epoch** (96.9% interval 1.10–1.60, n=12). By epoch_s it is faster than {DISK} "
        "by a factor of 2.00 (2.00–2.00, 96.9%).",
    ),
    "no pairs": (
        [a("disk", 2.0, repeat=1), a("ram", 1.0, repeat=2)],
        f"**Lowest median: {RAM}, 1.00 s per epoch** (single run). Without a common round, and so not compared with "
        f"it: {DISK}.",
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
        "Effect of the loader on the training pass (train_s): disk took 4.00 times as long as ram (a single round)."
        f"{FEW}",
    ),
    "interrupted": ([a("disk", 8.0), BROKEN], ""),
    "a first epoch only": ([a("disk", 8.0), a("ram")], ""),
    "ties": (
        rounds(6, disk=2.0, ram=2.0),
        "Effect of the loader on the training pass (train_s): disk and ram are not distinguishable: train_s differs "
        "by a factor of 1.00 (1.00–1.00, 96.9%).",
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
    "slow rounds for the faster": (
        [*rounds(6, disk=2.0, ram=1.9), *(a("disk", 0.1, repeat=number) for number in range(7, 20))],
        "Effect of the loader on the training pass (train_s): ram is faster than disk by a factor of 1.05 (1.05–1.05, "
        "96.9%).",
    ),
    "of training, not of the epoch": (
        [
            a(loader, repeat=n, epochs=[epoch(9.0), epoch(4.0, train_s=time, data_wait_s=0.1, compute_s=0.1)])
            for n in range(6)
            for loader, time in (("disk", 2.0), ("ram", 1.0))
        ],
        "Effect of the loader on the training pass (train_s): ram and disk are not distinguishable by epoch_s, though "
        "train_s differs by a factor of 2.00 (2.00–2.00, 96.9%).",
    ),
    "by batch size": (
        [a(loader, time * size, batch_size=size) for size in (1, 2) for loader, time in (("disk", 2.0), ("ram", 1.0))],
        "Effect of the loader on the training pass (train_s): disk took 2.00 times as long as ram (a single round) at "
        f"batch_size=1; disk took 2.00 times as long as ram (a single round) at batch_size=2.{FEW}",
    ),
    "workers of one loader": (
        [a("disk", 2.0 + n, config={"data.loader.num_workers": n}) for n in (0, 2)],
        "",
    ),
}


@pytest.mark.parametrize(("records", "expected"), FASTEST.values(), ids=FASTEST)
def test_the_fastest_is_named_as_surely_as_it_is_known(records: Records, expected: str, tmp_path: Path) -> None:
    assert fastest(the_only(write(tmp_path, records))) == expected


@pytest.mark.parametrize(("records", "expected"), EFFECT.values(), ids=EFFECT)
def test_the_effect_of_the_loader_is_that_of_training_alone(records: Records, expected: str, tmp_path: Path) -> None:
    assert effect_of_loader(the_only(write(tmp_path, records))) == expected


def test_a_summary_has_these_sentences_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, [a("disk", 8.0), a("ram", 2.0), BROKEN])
    told = [f"{SINGLE} Not ranked: data/loader=cache (interrupted).", EFFECT["one repeat"][1], SAME]
    assert summary(the_only(tmp_path)) == told


def test_mirrored_times_are_compared(tmp_path: Path) -> None:
    """Of which neither is the slower, but by rounding each may be."""
    mirrored = [("ram", 1, 1.0), ("ram", 2, 107.0), ("disk", 1, 107.0), ("disk", 2, 1.0)]
    for number, (loader, repeat, time) in enumerate(mirrored):
        run(tmp_path / str(number), **a(loader, time, repeat=repeat))
    assert "1.00 times as long" in effect_of_loader(the_only(tmp_path))


def test_machines_are_summarised_apart(tmp_path: Path) -> None:
    """Pairs of all of them count: a report with two comparisons of two rows has two pairs to be wrong about."""
    for number, record in enumerate(rounds(6, disk=2.0, ram=1.0)):
        for host in ("here", "there"):
            run(tmp_path / f"{number}-{host}", **record, environment={"host": host})
    for comparison in compared(tmp_path):
        assert "7 rounds in common are needed" in fastest(comparison)


def test_a_resumed_run_is_compared_without_the_first_epoch_of_each_start(tmp_path: Path) -> None:
    ends = [epoch(time, ended_at=end) for time, end in ((9.0, 10.0), (2.0, 12.0), (8.0, 110.0), (2.0, 112.0))]
    folder = run(tmp_path / "0", epochs=ends, began_at=100.0, ended_at=112.0)
    (folder / "resumed.yaml").touch()
    assert fastest(the_only(tmp_path)) == "**2.00 s per epoch** (single run)."


def test_a_search_for_the_shortest_time_to_an_accuracy_says_which_it_is(tmp_path: Path) -> None:
    aim = {"objective": "seconds_to_target", "target_acc": 97.0}
    slow = [epoch(1.0, eval_acc=90.0), epoch(1.0, eval_acc=97.0)]
    run(tmp_path / "0", config={"sweep": aim, "lr": 1.0}, epochs=slow)
    run(tmp_path / "1", config={"sweep": aim, "lr": 2.0}, epochs=[epoch(1.5, eval_acc=98.0)])
    run(tmp_path / "2", config={"sweep": aim, "lr": 3.0}, epochs=[epoch(0.5, eval_acc=96.0)])
    assert summary(the_only(tmp_path))[0] == "**Lowest median time to 97%: lr=2.0, 1.50 s** (single run)."
    run(tmp_path / "x" / "0", config={"sweep": {**aim, "target_acc": 99.0}}, epochs=slow)
    assert summary(the_only(tmp_path / "x"))[0] == "**No run whose times are compared reached 99%.**"
