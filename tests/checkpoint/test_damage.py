"""A checkpoint that cannot be used is one message, never a traceback."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import CallHere, Printed
from vitmnist.__main__ import main
from vitmnist.checkpoint import storage

DAMAGED = r"error: \S+/run/checkpoints: is damaged, or not of this version of the program or of the model's code: .+\n"


def test_a_state_that_fits_no_generator_is_damage(runs: Path, refuse: Printed, tmp_path: Path) -> None:
    shutil.copytree(runs / "cut", tmp_path / "run")
    state = storage.load(tmp_path / "run")
    assert state is not None
    state["rng"][0]["torch"] = torch.ones(3, dtype=torch.uint8)
    storage.save(tmp_path / "run", state)
    assert re.fullmatch(DAMAGED, refuse("resume=run", "max_minutes=null"))


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
