"""The states of a run's folder: every command is safe in each (docs/command-line.md), and `status` lists them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import CallHere, Printed, Start, Train, assert_same_run, result_of
from tests.support.pages import blocks
from tests.support.processes import REPOSITORY

BEGINS, RESUMES, DONE = "epoch 1/2", "resumed after", "completed, epoch 2/2"
REFUSED = "holds records already, which would be overwritten"
NO_RUN = "holds no run; pass a folder such as outputs/runs/"
ALL_DAMAGED = ".pt: is damaged or not a checkpoint: its checksum does not match"
DAMAGED_RECORD = "run/.hydra/config.yaml: is not YAML: "


class State(NamedTuple):
    """A state of a run's folder, and what each command prints in it."""

    build: Callable[[Path, Path], object]  # called with the fixture `runs` and the folder
    auto: str  # resume=auto hydra.run.dir=DIR
    resume: str  # resume=DIR
    plain: str  # hydra.run.dir=DIR alone


def make_lock(runs: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / ".lock").touch()


def copy_of(run: str, *changes: tuple[str, Callable[[Path], object]]) -> Callable[[Path, Path], object]:
    """Copy a run, then change the files that match each pattern."""

    def build(runs: Path, folder: Path) -> None:
        shutil.copytree(runs / run, folder)
        for pattern, change in changes:
            for path in folder.glob(pattern):
                change(path)

    return build


NO_CHECKPOINT, NO_RESULT = ("checkpoints/*.pt", Path.unlink), ("result.json", Path.unlink)
CUT_RESULT = "result.json", lambda file: file.write_text('{"status": "comp')
ZEROS = ".hydra/*", lambda file: file.write_bytes(bytes(file.stat().st_size))  # as after a power cut
BAD_CHECKPOINTS = "checkpoints/*.pt", lambda file: file.write_bytes(b"damaged")
STATES = {
    "absent": State(lambda runs, folder: None, BEGINS, NO_RUN, BEGINS),
    "lock only": State(make_lock, BEGINS, NO_RUN, BEGINS),
    "killed before a checkpoint": State(copy_of("cut", NO_CHECKPOINT, NO_RESULT), BEGINS, BEGINS, BEGINS),
    "interrupted before a checkpoint": State(copy_of("cut", NO_CHECKPOINT), BEGINS, BEGINS, REFUSED),
    "resumable": State(copy_of("cut"), RESUMES, RESUMES, REFUSED),
    "killed": State(copy_of("cut", NO_RESULT), RESUMES, RESUMES, REFUSED),
    "damaged result": State(copy_of("cut", CUT_RESULT), RESUMES, RESUMES, REFUSED),
    "damaged records": State(copy_of("cut", CUT_RESULT, ZEROS), DAMAGED_RECORD, DAMAGED_RECORD, REFUSED),
    "damaged checkpoints": State(copy_of("cut", BAD_CHECKPOINTS), ALL_DAMAGED, ALL_DAMAGED, REFUSED),
    "completed": State(copy_of("whole"), DONE, DONE, REFUSED),
    "completed, without checkpoints": State(copy_of("whole", NO_CHECKPOINT), DONE, DONE, REFUSED),
}


@pytest.mark.parametrize("command", ["auto", "resume", "plain"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_each_command_does_the_right_thing_in_each_state(
    state: State, command: str, runs: Path, stateful: list[str], train_here: Train, tmp_path: Path
) -> None:
    state.build(runs, tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    typed = {
        "auto": [*stateful, "resume=auto", "hydra.run.dir=run", "max_minutes=null"],
        "resume": ["resume=run", "max_minutes=null"],
        "plain": [*stateful, "hydra.run.dir=run"],
    }
    ended, expected = train_here(*typed[command]), getattr(state, command)
    assert expected in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    if expected in (BEGINS, RESUMES):
        assert ended.returncode == 0, ended.stderr
        assert ("epoch 1/2" in ended.stdout) == (expected == BEGINS or "after 0 epochs" in ended.stdout)
        assert_same_run(runs / "whole", tmp_path / "run")
    else:
        assert ended.returncode == (0 if expected == DONE else 1)
        kept = {path: content for path, content in before.items() if path.suffix != ".log"}
        assert {path: path.read_bytes() for path in kept} == kept


def test_without_checkpoints_no_run_is_extended(
    runs: Path, stateful: list[str], tmp_path: Path, refuse: Printed
) -> None:
    copy_of("whole", NO_CHECKPOINT)(runs, tmp_path / "run")
    for typed in (["resume=run"], [*stateful, "resume=auto", "hydra.run.dir=run"]):
        printed = refuse(*typed, "epochs=3")
        assert "error: run: is completed, and has no checkpoint to continue from; begin another run" in printed
    assert len(result_of(tmp_path / "run")["epochs"]) == 2


def test_states_of_runs_are_told_apart(quick: list[str], start: Start, tmp_path: Path, call_here: CallHere) -> None:
    def rows() -> list[list[str]]:
        return [line.split() for line in call_here("status", "runs").stdout.splitlines()[1:]]

    running = start(*quick, "epochs=100000", "hydra.run.dir=runs/a", output="a.log").until("epoch 2/")
    ((name, state, done, *_),) = rows()
    assert (name, state) == ("runs/a", "running")
    assert 2 <= int(done) < 100000
    running.ended(signal.SIGKILL)
    for path in (tmp_path / "runs" / "a", *(tmp_path / "runs" / "a").rglob("*")):
        os.utime(path, (datetime(2026, 1, 2, 3, 4, 5).timestamp(),) * 2)
    assert start(*quick, "hydra.run.dir=runs/b", output="b.log").ended()[0] == 0
    killed, completed = rows()
    assert (killed[:2], killed[4:]) == (["runs/a", "killed"], ["2026-01-02", "03:04:05"])
    assert completed[:3] == ["runs/b", "completed", "2"]


def test_json_has_plain_values(runs: Path, tmp_path: Path, call_here: CallHere) -> None:
    """This includes a run that has not begun."""
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "odd" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / ".hydra" / "config.yaml").write_text("seed: 1")
    cut, odd, whole = json.loads(call_here("status", "--json", "runs").stdout)
    assert cut["state"] == "interrupted"
    values = {"folder": "runs/whole", "name": None, "tags": [], "state": "completed", "epochs_done": 2, "epochs": 2}
    assert whole == values | {"written_at": result_of(runs / "whole")["ended_at"]}
    assert (odd["state"], odd["epochs_done"], odd["epochs"]) == ("not started", 0, None)
    assert abs(odd["written_at"] - time.time()) < 3600


@pytest.mark.slow
def test_the_documented_job_array_is_requeued_until_its_run_is_completed(quick: list[str], tmp_path: Path) -> None:
    """With stand-ins for Slurm: SIGUSR1 before training begins, a stop that saves, and the rest."""
    (script,) = blocks("sh", REPOSITORY / "docs" / "command-line.md")
    stand_ins = {
        "srun": 'exec timeout --signal=USR1 --preserve-status $LIMIT "$@"',
        "scontrol": 'echo "scontrol $*"',
        "vitmnist": f'exec {sys.executable} -m vitmnist "$@"',
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_ID": "36"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}

    def start(*typed: str, limit: float = 0) -> tuple[int, bool]:
        command = ["bash", "-c", script.replace("epochs=30", " ".join([*quick, *typed]))]
        environment = {**os.environ, **slurm, **path, "LIMIT": str(limit)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        return ended.returncode, "scontrol requeue 36_4\n" in ended.stdout

    assert start(limit=0.2) == (138, True)
    assert start("max_minutes=0") == (75, True)
    assert start("max_minutes=null") == (0, False)
    assert result_of(tmp_path / "outputs" / "sweeps" / "lr" / "0.003-2")["resumed"]
