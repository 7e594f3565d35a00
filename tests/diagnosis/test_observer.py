"""The figures of the loaders of a script are true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import SLOW_DATA, diagnose
from vitmnist.diagnosis.verdict import verdict


def test_figures_of_each_loader_are_true_and_consistent(tmp_path: Path) -> None:
    """In the main process and in forked workers, map-style and iterable; one loader per epoch is one block."""
    script = f"""{SLOW_DATA}
train(DataLoader(Slow(), batch_size=2))
train(DataLoader(Slow(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
train(DataLoader(Stream(), batch_size=2))
for epoch in range(2):
    for batch in DataLoader(Slow(), batch_size=4):
        pass
iterator = iter(DataLoader(Slow(), batch_size=2, num_workers=1))
assert len(iterator) == 12 and iter(iterator) is iterator and iterator._num_workers == 1
"""
    ended, report = diagnose(tmp_path, script, "--steps=15", "--warm-up=3", "--fail-above=95")
    assert ended.returncode == 1  # the last loader waits all the time
    assert "failed: waiting exceeds --fail-above 95%: mine.py:" in ended.stderr
    assert report["complete"]
    assert report["exit_code"] == 0
    main, workers, stream, rebuilt, untouched = report["loaders"]
    for figures in (main, workers, stream):
        assert (figures["steps"], figures["complete"]) == (15, True)
        assert figures["step_s"] >= 0.002
        assert figures["waiting_s"] + figures["step_s"] == pytest.approx(figures["batch_s"])
        assert figures["waiting_pct"] == pytest.approx(100 * figures["waiting_s"] / figures["batch_s"])
        assert len(figures["first_batches_s"]) == 2
        assert 0 < figures["overhead_s"] < figures["step_s"]
        assert figures["verdict"] == verdict(figures["batch_s"], figures["waiting_s"])
    assert 0.010 <= main["t1_s"] <= main["waiting_s"]
    assert main["first_batches_s"][0] >= 0.010
    assert workers["t1_s"] >= 0.010
    assert workers["t1_per_worker_s"] == workers["t1_s"] / 2
    assert stream["t1_s"] >= 0.002
    assert "from_dataloader" in main["advice"][0]["text"]
    assert "from_dataloader" not in stream["advice"][0]["text"]  # it is for map-style data sets
    assert rebuilt["batch_size"] == 4
    assert len(rebuilt["first_batches_s"]) == 2
    assert untouched["verdict"] is None


def test_loaders_used_in_turn_are_distinguished(tmp_path: Path) -> None:
    """The step of one has no wait for another; alike are those with the same line, settings, and length of the data."""
    script = f"""{SLOW_DATA}
fast, slow = DataLoader(Slow(0), batch_size=2), DataLoader(Slow(0.010), batch_size=2)
for batches in zip(fast, slow):
    pass
for epoch in range(2):
    train(DataLoader(Slow(), batch_size=4, shuffle=True), epochs=1)
    train(DataLoader(Slow(), batch_size=4), epochs=1)
    train(DataLoader(Slow(samples=16), batch_size=4), epochs=1)
"""
    ended, report = diagnose(tmp_path, script, "--warm-up=2")
    fast, slow, *rebuilt = report["loaders"]
    assert slow["waiting_s"] >= 0.020
    assert fast["step_s"] < slow["waiting_s"] / 2
    assert [(figures["num_loaders"], figures["batches_seen"]) for figures in rebuilt] == [(2, 12), (2, 12), (2, 8)]
    assert "  loaders     2 in turn, with the same line, settings, and class and length of the data set" in ended.stderr


def test_the_first_batches_of_epochs_are_in_the_waiting_share(tmp_path: Path) -> None:
    """Of all epochs but the first, which is the warm-up here."""
    script = f"""{SLOW_DATA}
train(DataLoader(Slow(samples=8), batch_size=2, num_workers=1), epochs=4)
loader = DataLoader(Slow(0))
for step in range(30):
    next(iter(loader))
"""
    ended, report = diagnose(tmp_path, script, "--warm-up=4", "--steps=12")
    short, single = report["loaders"]
    assert (short["complete"], short["batches_seen"]) == (True, 16)
    later_s = sum(short["first_batches_s"][1:])
    assert short["first_batches_pct"] == pytest.approx(100 * later_s / (12 * short["batch_s"]))
    assert short["first_batches_pct"] < short["waiting_pct"]
    assert f"(mean of 3); {short['first_batches_pct']:.0f}% of the time" in ended.stderr
    # No batch is followed by another one of its iterator, so no step has an end.
    assert (single["steps"], single["batches_seen"], len(single["first_batches_s"])) == (0, 30, 30)
    assert single["verdict"] is None
