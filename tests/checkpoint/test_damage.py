"""A checkpoint with a valid checksum but wrong values is one message, never a traceback."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.conftest import Printed
from tests.support.processes import TrainProcess
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.inference import load_inference_model
from vitmnist.cli.messages import describe
from vitmnist.cli.resume import recorded_config
from vitmnist.errors import DataError
from vitmnist.run import run
from vitmnist.runtime.failures import Failure
from vitmnist.runtime.signals import UNFINISHED, StopSignal

WRONG: list[Any] = [None, "x", [], torch.ones(3)]
HARMLESS = {("device", "x"), ("epochs", "[]"), ("rng", "[]")}  # what another run could have saved

Place = tuple[Any, ...]
Failing = Callable[[Any], Failure | None]


@pytest.fixture(scope="module")
def stopped(stateful: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, that was stopped within its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    first = [*stateful, "tensorboard.every_steps=1", "hydra.run.dir=run", "epochs=1"]
    assert TrainProcess(folder, *first).ended()[0] == 0
    assert TrainProcess(folder, "resume=run", "epochs=2", "max_minutes=0").ended()[0] == UNFINISHED
    return folder


@pytest.fixture(scope="module")
def kept(stopped: Path) -> dict[str, Any]:
    """The checkpoint of the run."""
    state = storage.load(stopped / "run")
    assert state is not None
    return state


def replaced(state: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place."""
    if not place:
        return value
    changed = list(state) if isinstance(state, tuple) else copy.copy(state)
    changed[place[0]] = replaced(state[place[0]], place[1:], value)
    return changed


@pytest.fixture
def failure(stopped: Path, tmp_path: Path) -> Failing:
    """Resume the run from this state alone; returns how it failed, None if it ended."""

    def resume(state: Any) -> Failure | None:
        with TemporaryDirectory(dir=tmp_path) as folder:
            storage.save(Path(folder), state)
            try:
                run(
                    recorded_config(stopped / "run", ["max_minutes=null", f"resume={folder}"]),
                    Path(folder),
                    [],
                    StopSignal(),
                )
            except Exception as error:
                return describe(error)
        return None

    return resume


def test_a_field_of_a_wrong_type_is_damage(kept: dict[str, Any], failure: Failing) -> None:
    assert all((kept["progress"], kept["epochs"])), "the run has an epoch behind it and one under way"
    messages = {"format": "another version", "config": "resume: the run began with another configuration"}
    for name in kept:
        for wrong in WRONG:
            found = failure({**kept, name: wrong})
            assert found is None or found.is_user_error, (name, wrong, found)
            if (name, str(wrong)) not in HARMLESS:
                assert found is not None, (name, wrong)
                expected = ("is damaged", messages.get(name, "is damaged"))
                assert any(message in found.message for message in expected), (name, wrong, found)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("step", "optimizer", "state", 0, "exp_avg"), torch.ones(())),
        (("step", "optimizer", "state", 0, "exp_avg_sq"), torch.ones(3)),
        (("step", "optimizer", "param_groups", 0, "lr"), "x"),
        (("step", "schedule", "last_epoch"), "x"),
        (("step", "ema"), None),
        (("rng", 0, "numpy", 1), [1, 2, 3]),
        (("rng", 0, "numpy", 2), 10**6),
        (("rng", 0, "torch"), torch.ones(3, dtype=torch.uint8)),
        (("rng", 0), "x"),
        (("progress",), {"metrics": {}}),
        (("progress", "metrics", "sums", "loss"), torch.ones(())),
        (("progress", "metrics", "steps"), 100),
        (("progress", "lrs"), [0.1] * 100),
        (("progress", "norms"), {"x": 1.0}),
        (("progress", "seconds", "waiting"), "x"),
        (("step_config", "micro_batch"), "x"),
        (("epochs", 0), {}),
        (("epochs", 0, "eval_acc"), None),
        (("epochs", 0, "steps", 0), 7),
    ],
    ids=str,
)
def test_a_wrong_value_within_a_field_is_damage(
    kept: dict[str, Any], failure: Failing, place: Place, wrong: Any
) -> None:
    found = failure(replaced(kept, place, wrong))
    assert found is not None
    assert found.is_user_error, found
    assert "checkpoints: is damaged, or not of this version of the program: " in found.message


def test_the_command_says_so_in_one_line(stopped: Path, kept: dict[str, Any], refuse: Printed, tmp_path: Path) -> None:
    shutil.copytree(stopped / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    storage.save(tmp_path / "run", replaced(kept, ("step", "ema"), None))
    printed = refuse("resume=run", "max_minutes=null")
    assert re.fullmatch(r"error: \S+/run/checkpoints: is damaged, or not of this version of the program: .*\n", printed)


def test_weights_of_a_wrong_type_are_not_used(kept: dict[str, Any], tmp_path: Path) -> None:
    """By `evaluate`, `predict` and `export`, which all load them like this."""
    for place in (("model_info",), ("step",), *(("model_info", key) for key in kept["model_info"])):
        for wrong in WRONG:
            storage.save(tmp_path, replaced(kept, place, wrong))
            with pytest.raises(DataError, match=r"last\.pt: is damaged, or not of this version of the program: "):
                load_inference_model(tmp_path, torch.device("cpu"), "last")
