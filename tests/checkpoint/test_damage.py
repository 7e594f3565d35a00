"""A checkpoint with a valid checksum but wrong values is one message, never a traceback."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import STATEFUL, Train, overrides_for
from tests.support.processes import TrainProcess
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.inference import load_inference_model
from vitmnist.errors import DataError
from vitmnist.runtime.signals import UNFINISHED

WRONG: list[Any] = [None, "x", [], torch.ones(3)]
HARMLESS = {("device", "x"), ("epochs", "[]"), ("rng", "[]")}  # what another run could have saved

Place = tuple[Any, ...]


@pytest.fixture(scope="module")
def stopped(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, that was stopped within its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    overrides = overrides_for(tiny_root, *STATEFUL, "optimizer=adamw", "tensorboard.every_steps=1", "hydra.run.dir=run")
    assert TrainProcess(folder, *overrides, "epochs=1").ended()[0] == 0
    assert TrainProcess(folder, "resume=run", "epochs=2", "max_minutes=0").ended()[0] == UNFINISHED
    return folder


def places(state: Any, place: Place = ()) -> Iterator[Place]:
    """The keys that lead to each value within nested dicts, lists and tuples."""
    children = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in [*children][:40]:  # not all words of a generator
        yield (*place, key)
        yield from places(value, (*place, key))


def replaced(state: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place."""
    if not place:
        return value
    changed = list(state) if isinstance(state, tuple) else copy.copy(state)
    changed[place[0]] = replaced(state[place[0]], place[1:], value)
    return changed


def resumed(folder: Path, state: dict[str, Any], train_here: Train, target: Path) -> tuple[int, str]:
    """The exit code and the messages of resuming a copy of a run from this state alone."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    shutil.rmtree(target / "run" / "checkpoints")
    storage.save(target / "run", state)
    ended = train_here("resume=run", "max_minutes=null", folder=target)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_field_of_a_wrong_type_is_damage(stopped: Path, train_here: Train, tmp_path: Path) -> None:
    kept = storage.load(stopped / "run")
    assert kept is not None
    assert all((kept["progress"], kept["epochs"])), "the run has an epoch behind it and one under way"
    for name in kept:
        for wrong in WRONG:
            code, output = resumed(stopped, {**kept, name: wrong}, train_here, tmp_path / "copy")
            assert "Traceback" not in output, (name, wrong, output)
            if (name, str(wrong)) in HARMLESS:
                continue
            assert code == 1, (name, wrong, output)
            messages = {"format": "another version", "config": "resume: the run began with another configuration"}
            expected = ("is damaged", messages.get(name, "is damaged"))
            assert any(message in output for message in expected), (name, wrong, output)


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
    stopped: Path, train_here: Train, tmp_path: Path, place: Place, wrong: Any
) -> None:
    kept = storage.load(stopped / "run")
    code, output = resumed(stopped, replaced(kept, place, wrong), train_here, tmp_path / "copy")
    assert code == 1, output
    assert "error: " in output
    assert "run/checkpoints: is damaged, or not of this version of the program: " in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_no_value_anywhere_ends_in_a_traceback(stopped: Path, train_here: Train, tmp_path: Path) -> None:
    """Forty of all places and wrong values, always the same ones."""
    kept = storage.load(stopped / "run")
    tries = [(place, wrong) for place in places(kept) for wrong in WRONG]
    for place, wrong in random.Random(1).sample(tries, 40):
        code, output = resumed(stopped, replaced(kept, place, wrong), train_here, tmp_path / "copy")
        assert "Traceback" not in output, (place, wrong, output)
        assert code == 0 or "error: " in output, (place, wrong, output)


def test_weights_of_a_wrong_type_are_not_used(stopped: Path, tmp_path: Path) -> None:
    """By `evaluate`, `predict` and `export`, which all load them like this."""
    kept = storage.load(stopped / "run")
    assert kept is not None
    for place in (("model_info",), ("step",), *((*name, key) for name in [("model_info",)] for key in kept[name[0]])):
        for wrong in WRONG:
            storage.save(tmp_path, replaced(kept, place, wrong))
            with pytest.raises(DataError, match=r"last\.pt: is damaged, or not of this version of the program: "):
                load_inference_model(tmp_path, torch.device("cpu"), "last")
