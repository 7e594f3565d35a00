"""A run under way leaves signs of life, and `vitmnist status` lists them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import CallHere, Start
from vitmnist.cli import status
from vitmnist.tracking.heartbeat import FILE, Heartbeat
from vitmnist.tracking.runs import read_run


def row_of(folder: Path) -> dict[str, str]:
    return status.row(read_run(folder), time.time())


def test_a_run_under_way_a_killed_and_a_completed_one_are_told_apart(
    quick: list[str], start: Start, tmp_path: Path, call_here: CallHere
) -> None:
    running = start(*quick, "epochs=100000", "hydra.run.dir=runs/a", output="a.log").until("epoch 2/")
    beat = json.loads((tmp_path / "runs" / "a" / FILE).read_text())
    assert (beat["pid"], beat["epochs"]) == (running.pid, 100000)
    row = row_of(tmp_path / "runs" / "a")
    assert row["state"] in ("setting up", "training", "evaluating")
    assert row["process"].endswith(f":{running.pid}")
    running.ended(signal.SIGKILL)
    old = {**beat, "updated_at": time.time() - 7200}
    (tmp_path / "runs" / "a" / FILE).write_text(json.dumps(old))
    row = row_of(tmp_path / "runs" / "a")
    assert (row["state"], row["age"]) == ("killed", "2 h")
    for damaged in ("", "null", "[]", '{"updated_at": "x"}'):
        (tmp_path / "runs" / "a" / FILE).write_text(damaged)
        assert row_of(tmp_path / "runs" / "a")["state"] == "killed"
    assert start(*quick, "hydra.run.dir=runs/b", output="b.log").ended()[0] == 0
    assert not (tmp_path / "runs" / "b" / FILE).exists()
    printed = call_here(status.main, "runs").stdout
    assert [line.split()[:2] for line in printed.splitlines()[1:]] == [["runs/a", "killed"], ["runs/b", "completed"]]
    assert "epoch 2/2" in printed


def test_signs_of_life_continue_while_the_main_thread_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitmnist.tracking.heartbeat.INTERVAL_S", 0.01)
    with Heartbeat(tmp_path, epochs=3) as heartbeat:
        heartbeat.begin_pass("training", epoch=1, batch=4, batches=9)
        deadline = time.monotonic() + 10
        seen = set()
        while len(seen) < 3 and time.monotonic() < deadline:
            if (tmp_path / FILE).exists():
                beat = json.loads((tmp_path / FILE).read_text())
                seen.add(beat["updated_at"])
    assert len(seen) == 3
    assert {key: beat[key] for key in ("status", "epoch", "epochs", "batch", "batches", "pid")} == {
        "status": "training",
        "epoch": 1,
        "epochs": 3,
        "batch": 4,
        "batches": 9,
        "pid": os.getpid(),
    }
    assert list(tmp_path.iterdir()) == []
