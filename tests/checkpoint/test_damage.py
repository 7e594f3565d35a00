"""A checkpoint that cannot be used is one message, never a traceback."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import CallHere, Printed, Train
from vitmnist.__main__ import main
from vitmnist.checkpoint import storage
from vitmnist.training.step import TrainStep

DAMAGED = r"error: \S+/run/checkpoints: is damaged, or not of this version of the program or of the model's code: .+\n"


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("step", "optimizer", "state", 0, "exp_avg"), torch.ones(())),
        (("rng", 0, "torch"), torch.ones(3, dtype=torch.uint8)),
    ],
    ids=str,
)
def test_a_state_of_no_run_is_damage(place: tuple, wrong: Any, runs: Path, refuse: Printed, tmp_path: Path) -> None:
    shutil.copytree(runs / "cut", tmp_path / "run")
    changed = state = storage.load(runs / "cut")
    for name in place[:-1]:
        changed = changed[name]
    changed[place[-1]] = wrong
    storage.save(tmp_path / "run", state)
    assert re.fullmatch(DAMAGED, refuse("resume=run", "max_minutes=null"))


@pytest.mark.parametrize("failing", [1, 2])
def test_only_what_the_first_step_raises_is_blamed_on_the_checkpoint(
    failing: int, runs: Path, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = TrainStep.__call__, 0

    def fail(self: TrainStep, *parts: Any) -> object:
        nonlocal calls
        calls += 1
        return 1 / 0 if calls == failing else step(self, *parts)

    monkeypatch.setattr(TrainStep, "__call__", fail)
    shutil.copytree(runs / "cut", tmp_path / "run")
    ended = train_here("resume=run", "max_minutes=null")
    assert bool(re.fullmatch(DAMAGED, ended.stderr)) == (failing == 1)
    assert ("ZeroDivisionError" in ended.stderr) == (failing == 2)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "of another program": lambda content: b"[1, 2]",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("result.json", "report ."),
        (".hydra/config.yaml", "evaluate ."),
        ("checkpoints/last.pt", "resume=. epochs=3"),
        ("checkpoints/last.pt", "evaluate . --weights=last"),
        ("checkpoints/final.safetensors", "evaluate ."),
    ],
)
def test_a_damaged_record_is_named_in_one_line(
    name: str, command: str, damage: Callable[[bytes], bytes], runs: Path, call_here: CallHere, tmp_path: Path
) -> None:
    folder = shutil.copytree(runs / "whole", tmp_path / "run")
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    ended = call_here(main, *command.split(), folder=folder)
    assert "Traceback" not in ended.stdout + ended.stderr
    (named,) = (line for line in (ended.stdout + ended.stderr).splitlines() if name in line)
    if name == "result.json":
        assert "unreadable: " in named
    elif name == ".hydra/config.yaml":
        assert named.endswith("; its checkpoint has the configuration")
    else:
        assert ended.stderr.startswith("error: ")
        assert "is damaged" in named
