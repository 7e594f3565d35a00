"""Hostile copies of run and sweep folders, and typed values that no program can use, end in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import CallHere, Train
from vitmnist.checkpoint import storage
from vitmnist.cli import evaluate


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch marker",)


OBEYED = "\x1b[31mred\x9b\x07"  # by a terminal


@pytest.mark.parametrize(
    "change",
    [
        {"format": OBEYED},
        {"config": {"device": OBEYED}},
        {"config": {OBEYED: 1}},
        {"step_config": {OBEYED: 1}},
        {"step": {OBEYED: 1}},
        {"epochs": [{OBEYED: 1}]},
        {OBEYED: 1},
        {"epochs": Command()},
    ],
)
@pytest.mark.parametrize("record", ["there", "lost"])
def test_a_terminal_obeys_nothing_of_a_checkpoint(
    change: dict[str, Any], record: str, runs: Path, tmp_path: Path, train_here: Train
) -> None:
    folder = shutil.copytree(runs / "cut", tmp_path / "cut")
    state = storage.load(folder)
    assert state is not None
    values = state["config"] | change["config"] if "config" in change else None
    storage.save(folder, state | change | ({"config": values} if values else {}))
    (folder / "checkpoints" / "previous.pt").unlink(missing_ok=True)
    if record == "lost":
        (folder / ".hydra" / "config.yaml").unlink()
    ended = train_here("resume=cut")
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    printed = ended.stdout + ended.stderr
    assert not [one for one in "\x1b\x9b\x07" if one in printed], printed
    assert "weights_only" not in printed
    if isinstance(change.get("epochs"), Command):
        assert "its content is not only plain values and tensors" in printed
        assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("change", [{"model": {"name": OBEYED}}, {"std": [0.0]}, {"std": [float("nan")]}])
def test_weights_with_impossible_metadata_are_damaged(
    change: dict[str, Any], runs: Path, tmp_path: Path, call_here: CallHere
) -> None:
    folder = shutil.copytree(runs / "whole", tmp_path / "run")
    file = folder / "checkpoints" / "final.safetensors"
    with safe_open(file, framework="pt") as opened:
        info = json.loads(opened.metadata()["vitmnist"])
    save_file(load_file(file), file, {"vitmnist": json.dumps(info | change)})
    ended = call_here(evaluate.main, "run")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: run/checkpoints/final.safetensors: is damaged, or not of this version")
    assert ended.stderr[:-1].isprintable()


def resumed_sweep(swept: Path, folder: Path, task: list[str], of_hydra: list[str]) -> Path:
    """A copy of the sweep with overrides added to its record, as `swept`."""
    shutil.copytree(swept, folder / "swept")
    file = folder / "swept" / "multirun.yaml"
    recorded = yaml.safe_load(file.read_text())
    recorded["hydra"]["overrides"]["task"] += task
    recorded["hydra"]["overrides"]["hydra"] += of_hydra
    file.write_text(yaml.safe_dump(recorded))
    return file


def test_a_record_starts_no_search(swept: Path, tmp_path: Path, train_here: Train) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    resumed_sweep(swept, tmp_path, [], ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1000000000"])
    ended = train_here("sweep.resume=swept")
    assert ended.stderr == "error: sweep.resume: resumes a sweep over listed values, not a search; start a new one\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["-m", "seed=range(0,1,0)"], "range(START,STOP,STEP) of no values: all three must be finite, and STEP not 0"),
        (["-m", "seed=range(0,1,nan)"], "range(START,STOP,STEP) of no values"),
        (["-m", "hydra.sweeper.max_batch_size=0", "seed=1,2"], "max_batch_size=0: must be at least 1"),
        (["resume=~nobody-here"], "a path begins with ~NAME, and there is no user of this name"),
        (["data/dataset=cifar10", "model=cnn", "data.root='~nobody-here'"], "a path begins with ~NAME"),
    ],
    ids=["no step", "not a number", "no jobs", "resume", "data.root"],
)
def test_a_typed_value_that_cannot_be_used_is_one_line(typed: list[str], message: str, train_here: Train) -> None:
    ended = train_here(*typed)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_auto_passes_over_folders_that_cannot_be_resumed_and_says_why(
    runs: Path, stateful: list[str], tmp_path: Path, train_here: Train
) -> None:
    group = tmp_path / "outputs" / "runs" / "a"
    for name in ("good", "linked", "gone", "${x}", "\x1bx"):
        shutil.copytree(runs / "cut", group / name)
    (group / "linked" / "vitmnist.log").unlink(missing_ok=True)
    (group / "linked" / "vitmnist.log").symlink_to(tmp_path / "elsewhere")
    (group / "gone" / "checkpoints" / "last.pt").unlink()
    (group / "gone" / "checkpoints" / "last.pt").symlink_to("nowhere")
    ended = train_here(*stateful, "resume=auto", "max_minutes=0")
    assert "resume=auto: resuming outputs/runs/a/good\n" in ended.stdout, ended.stderr
    for name in ("linked", "gone", "${x}", r"\x1bx"):
        assert f"resume=auto: not outputs/runs/a/{name}: " in ended.stdout
