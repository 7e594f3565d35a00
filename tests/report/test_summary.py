"""Records of known content give exactly the true sentences."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.records import Records, epoch, rounds, table_of, the_only, three_rounds, timed_run, write
from vitmnist.report import summary

TWO_TO_ONE = (("disk", 2.0), ("ram", 1.0))
RANGE = "1.20 s per epoch (range 1.10–1.30, n=3)."
SAME = "1.00 s per epoch (range 1.00–1.00, n=3)."


def exactly(ratio: float) -> str:
    return f"{ratio:.2f} times as long (95% interval {ratio:.2f}–{ratio:.2f})"


TIMES: dict[str, tuple[Records, list[str]]] = {
    "one repeat": (
        [timed_run("disk", 8.0), timed_run("ram", 2.0)],
        ["Times: 2.00–8.00 s per epoch, one round, not compared; set repeats=3 or more."],
    ),
    "one configuration": (rounds(3, ram=1.0), [f"Time: {RANGE}"]),
    "first epochs only": ([timed_run("disk"), timed_run("ram")], [summary.NO_TIME]),
    "options of a loader": (
        three_rounds(
            timed_run("ram", 1.0),
            *(timed_run("disk", 4.0 - count, config={"data.loader.num_workers": count}) for count in (0, 1, 2)),
        ),
        [
            f"Lowest time: ram, {SAME} Compared within each round, disk num_workers=2 takes {exactly(2)}, disk "
            f"num_workers=1 takes {exactly(3)}, disk num_workers=0 takes {exactly(4)}."
        ],
    ),
    "three rounds of four": (
        rounds(3, disk=2.0, ram=1.0, cache=1.005, gpu_slice=1.2),
        [
            f"Lowest time: ram, {RANGE} Compared within each round, gpu_slice takes {exactly(1.2)}, disk takes "
            f"{exactly(2)}. Within noise of it: cache."
        ],
    ),
    "no difference, and too few rounds": (
        [*rounds(3, ram=1.0, cache=1.005), *rounds(2, disk=0.5)],
        [
            f"Lowest time of those compared: ram, {RANGE} Within noise of it: cache. Not compared, with fewer than 3 "
            "rounds in common: disk."
        ],
    ),
    "a loader that misses the fast rounds": (
        [
            *(timed_run("ram", 1.0 if repeat < 3 else 0.5, repeat=repeat) for repeat in range(7)),
            *(timed_run("disk", 0.8, repeat=repeat) for repeat in range(3)),
        ],
        [
            "Lowest time: disk, 0.800 s per epoch (range 0.800–0.800, n=3). Compared within each round, ram takes "
            f"{exactly(1.25)}."
        ],
    ),
    "seeds of a round are one measurement": (
        [timed_run(loader, time + seed / 100, seed=seed) for seed in range(6) for loader, time in TWO_TO_ONE],
        ["Times: 1.02–2.02 s per epoch, one round, not compared; set repeats=3 or more."],
    ),
    "configurations within noise": (
        three_rounds(
            *(timed_run("ram", time, config={"model.depth": depth}) for depth, time in ((3, 1.0), (6, 1.001), (9, 2.0)))
        ),
        [f"Lowest time: depth=3, {SAME} Within noise of it: depth=6."],
    ),
    "by batch size": (
        three_rounds(
            *(timed_run(loader, time * size, batch_size=size) for size in (1, 2) for loader, time in TWO_TO_ONE)
        ),
        [
            f"Lowest time at batch_size=1: ram, {SAME} Compared within each round, disk takes {exactly(2)}.",
            "Lowest time at batch_size=2: ram, 2.00 s per epoch (range 2.00–2.00, n=3). Compared within each round, "
            f"disk takes {exactly(2)}.",
        ],
    ),
}


@pytest.mark.parametrize(("records", "expected"), TIMES.values(), ids=TIMES)
def test_the_answer_is_no_more_certain_than_the_data(records: Records, expected: list[str], tmp_path: Path) -> None:
    assert summary.summarize_times(the_only(write(tmp_path, records))) == expected


def accuracies(depth: int, *by_seed: float, key: str = "seed", **record: Any) -> Records:
    return [
        {"epochs": [epoch(2.0, eval_acc=value)], "config": {key: seed, "model.depth": depth}, **record}
        for seed, value in enumerate(by_seed)
    ]


ONE_SEED = "One seed does not show the noise; set seed=1,2,3 or more."
QUALITY: dict[str, tuple[Records, str]] = {
    "one seed": (
        accuracies(3, 97.0) + accuracies(6, 97.1) + accuracies(9, 90.0),
        f"Highest test accuracy: depth=6, 97.10%. {ONE_SEED}",
    ),
    "six seeds": (
        accuracies(3, 70.0, 70.5, 70.2, 70.1, 70.4, 70.3) + accuracies(6, *(90.25 + n / 8 for n in range(6))),
        "Highest mean test accuracy: depth=6, 90.56% ± 0.23 (mean ± sd over 6 seeds). That is more "
        "than noise: it leads all others by at least 20.05 percentage points (95% interval).",
    ),
    "three folds": (
        accuracies(3, 70.0, 70.5, 70.2, key="data.fold") + accuracies(6, 90.0, 90.5, 90.25, key="data.fold"),
        "Highest mean test accuracy: depth=6, 90.25% ± 0.25 (mean ± sd over 3 folds). That is more than noise: it "
        "leads all others by at least 19.94 percentage points (95% interval, too narrow for folds, which share "
        "training images).",
    ),
    "noise": (
        accuracies(3, 97.0, 97.3, 97.1) + accuracies(6, 97.2, 97.0, 97.4) + accuracies(9, 90.0, 90.1, 89.9),
        "Highest mean test accuracy: depth=6, 97.20% ± 0.20 (mean ± sd over 3 seeds). 3 seeds are too few "
        "to separate it from depth=3; add seeds.",
    ),
    "noise alone": (
        [record for depth in range(5, 0, -1) for record in accuracies(depth, 97.0, 97.3 - depth / 100, 97.1)],
        "Highest mean test accuracy: depth=1, 97.13% ± 0.15 (mean ± sd over 3 seeds). 3 seeds are too few to separate "
        "it from any other; add seeds.",
    ),
    "each seed gains the same": (
        accuracies(3, 97.0, 97.5, 97.25) + accuracies(6, 96.0, 96.5, 96.25),
        "Highest mean test accuracy: depth=3, 97.25% ± 0.25 (mean ± sd over 3 seeds). 3 seeds do not show the "
        "noise; set seed=1,2,3 or more.",
    ),
    "one configuration": (accuracies(3, 97.0, 98.0), "Test accuracy: 97.50% ± 0.71 (mean ± sd over 2 seeds)."),
    "one configuration, one seed": (accuracies(3, 97.0), "Test accuracy: 97.00%."),
    "no accuracy": (accuracies(3, 97.0, status="failed"), ""),
    "two loaders": (
        [timed_run(loader, 2.0, seed=seed) for loader in ("disk", "ram") for seed in (1, 2)],
        "Test accuracy: 90.00% ± 0.00 (mean ± sd over 2 seeds).",
    ),
    "all equal": (
        accuracies(3, 97.0, 98.0) + accuracies(6, 97.0, 98.0),
        "Test accuracy: 97.50% ± 0.71 (mean ± sd over 2 seeds) in each configuration.",
    ),
    "the lowest loss is the best": (
        [
            {"epochs": [epoch(2.0, eval_loss=loss)], "config": {"monitor": "loss", "model.depth": depth}}
            for depth, loss in ((3, 0.25), (6, 0.5))
        ],
        f"Lowest test loss: depth=3, 0.2500. {ONE_SEED}",
    ),
}


@pytest.mark.parametrize(("records", "expected"), QUALITY.values(), ids=QUALITY)
def test_the_best_is_named_and_whether_that_is_more_than_noise(records: Records, expected: str, tmp_path: Path) -> None:
    comparison = the_only(write(tmp_path, records))
    assert f"{summary.summarize_quality(comparison)} {summary.summarize_noise(comparison)}".strip() == expected
    assert " ".join(summary.summarize_comparison(comparison)).startswith(expected)


def test_the_table_marks_what_is_within_noise_of_the_best(tmp_path: Path) -> None:
    records, _ = QUALITY["noise"]
    rows = table_of(write(tmp_path, records))
    assert [row["test accuracy, %"] for row in rows] == ["97.20 ± 0.20", "† 97.13 ± 0.15", "90.00 ± 0.10"]


def test_a_report_counts_the_configurations_for_which_the_gpu_waits(tmp_path: Path) -> None:
    """A step takes 0.8 s, and Python is 0.1 s or 2 s ahead. A captured step has no advice on the trainer."""
    steps = {"config": {"batch_size": 3, "epochs": 3}, "device": "cuda:0"}
    records = [
        {"epochs": [epoch(20.0, data_wait_pct=1.0, host_lead_s=lead)] * 2, "trainer": {"graph": graph}, **steps}
        for lead, graph in ((0.1, False), (0.1, True), (2.0, False))
    ]
    for depth, record in enumerate(records):
        record["config"] = {**record["config"], "model.depth": depth}
    sentence = "Launch-bound, the GPU waits for Python: {}; {}a larger batch_size helps."
    comparison = the_only(write(tmp_path / "all", records))
    assert summary.summarize_comparison(comparison)[-1] == sentence.format("2 of 3 configurations", "trainer=fast or ")
    graphs = the_only(write(tmp_path / "graph", records[1:]))
    assert summary.summarize_launches(graphs) == sentence.format("1 of 2 configurations", "")
    assert not summary.summarize_launches(the_only(write(tmp_path / "fast", records[2:])))


def test_a_monitored_time_is_not_taken_for_quality(tmp_path: Path) -> None:
    """Loaders deliver identical batches, but not in the same time."""
    records = rounds(3, disk=2.0, ram=1.0)
    for record in records:
        record["config"]["monitor"] = "epoch_s"
    (sentence,) = summary.summarize_comparison(the_only(write(tmp_path, records)))
    assert sentence.startswith("Lowest time: ram,")
