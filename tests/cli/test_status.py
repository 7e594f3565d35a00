"""`vitmnist status` lists runs with what they have done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from datetime import datetime
from pathlib import Path

from tests.conftest import CallHere, Start, result_of
from vitmnist.cli.report import status


def test_states_of_runs_are_told_apart(quick: list[str], start: Start, tmp_path: Path, call_here: CallHere) -> None:
    def rows() -> list[list[str]]:
        return [line.split() for line in call_here(status, "runs").stdout.splitlines()[1:]]

    running = start(*quick, "epochs=100000", "hydra.run.dir=runs/a", output="a.log").until("epoch 2/")
    ((name, state, done, *_),) = rows()
    assert (name, state) == ("runs/a", "running")
    assert 2 <= int(done.removesuffix("/100000")) < 100000
    running.ended(signal.SIGKILL)
    for path in (tmp_path / "runs" / "a", *(tmp_path / "runs" / "a").iterdir()):
        os.utime(path, (datetime(2026, 1, 2, 3, 4, 5).timestamp(),) * 2)
    assert start(*quick, "hydra.run.dir=runs/b", output="b.log").ended()[0] == 0
    killed, completed = rows()
    assert (killed[:2], killed[3:]) == (["runs/a", "killed"], ["2026-01-02", "03:04:05"])
    assert completed[:3] == ["runs/b", "completed", "2/2"]


def test_json_has_plain_values(runs: Path, tmp_path: Path, call_here: CallHere) -> None:
    """This includes a run that has not begun."""
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "odd" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / ".hydra" / "config.yaml").write_text("seed: 1")
    cut, odd, whole = json.loads(call_here(status, "--json", "runs").stdout)
    assert cut["state"] == "interrupted"
    assert whole == {
        "folder": "runs/whole",
        "state": "completed",
        "epochs_done": 2,
        "epochs": 2,
        "written_at": result_of(runs / "whole")["ended_at"],
    }
    assert (odd["state"], odd["epochs_done"], odd["epochs"]) == ("not started", 0, None)
    assert abs(odd["written_at"] - time.time()) < 3600
