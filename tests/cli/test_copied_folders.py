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
from vitmnist.cli.arguments import for_hydra
from vitmnist.errors import ConfigError


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


VIT: Any = {"name": "vit", "patch_size": 7, "dim": 64, "depth": 6, "heads": 8, "head_dim": 8, "mlp_dim": 128}


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**VIT, "depth": 10**9}},
        {"model": {**VIT, "mlp_dim": 10**9}},
        {"model": {**VIT, "dim": 10**30}},
        {"model": {"name": "cnn", "width": 10**6}},
        {"model": {"name": OBEYED}},
        {"shape": [1, 10**12, 10**12], "model": VIT},
        {"shape": [1, 10**5, 10**5], "model": {**VIT, "patch_size": 1}},
        {"std": [0.0]},
        {"std": [float("nan")]},
    ],
)
def test_a_model_that_does_not_fit_its_weights_is_not_built(
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


def test_a_recorded_launcher_starts_no_more_processes_than_there_are_cores(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    numbers = ["n_jobs=4", "n_jobs=-1", "timeout_min=600", "n_jobs=5", "n_jobs=nan", "ray.init.num_cpus=1e9"]
    resumed_sweep(swept, tmp_path, [], [f"hydra.launcher.{one}" for one in numbers])
    taken = [one for one in for_hydra(["sweep.resume=swept"])[0] if one.startswith("hydra.launcher.")]
    assert taken == [f"hydra.launcher.{one}" for one in numbers[:3]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["seed=1"] * 60_000, "more than 10,000 characters"),
        (["seed=" + "1," * 49_000 + "1"], "more than 10,000 characters"),
        (["seed=range(0,1,0)"], "has an override that cannot be evaluated"),
        (["seed=range(0,1,nan)"], "has an override that cannot be evaluated"),
        (["data.root=" + "[" * 2000 + "]" * 2000], "has an override that cannot be evaluated"),
    ],
    ids=["many", "long", "no step", "not a number", "deep"],
)
def test_a_recorded_command_line_is_bounded(
    lines: list[str], message: str, swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resumed_sweep(swept, tmp_path, lines, [])
    with pytest.raises(ConfigError, match=rf"^swept/multirun\.yaml: .*{message}"):
        for_hydra(["sweep.resume=swept"])


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
        (["data.root=" + "[" * 2000 + "]" * 2000], "a value that is nested too deeply"),
        (["data.root=" + "{a:" * 2000 + "1" + "}" * 2000], "a value that is nested too deeply"),
        (["resume=~nobody-here"], "a path begins with ~NAME, and there is no user of this name"),
        (["data/dataset=cifar10", "model=cnn", "data.root='~nobody-here'"], "a path begins with ~NAME"),
    ],
    ids=["no step", "not a number", "no jobs", "deep list", "deep mapping", "resume", "data.root"],
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


def test_a_hard_linked_copy_does_not_change_the_original(runs: Path, tmp_path: Path, train_here: Train) -> None:
    original = shutil.copytree(runs / "cut", tmp_path / "original")
    shutil.copytree(original, tmp_path / "cut", copy_function=os.link)
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    ended = train_here("resume=cut")
    assert ended.returncode == 1
    assert "is a hard link, so that a run would change another folder too; copy this one with cp -r" in ended.stderr
    assert {path: path.read_bytes() for path in original.rglob("*") if path.is_file()} == before
    shutil.copytree(tmp_path / "cut", tmp_path / "copy")
    assert "resumed after" in train_here("resume=copy").stdout


def test_a_sweep_over_a_long_list_is_resumed(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seeds = "seed=" + ",".join(map(str, range(1500)))
    resumed_sweep(swept, tmp_path, [seeds], [])
    assert seeds in for_hydra(["sweep.resume=swept"])[0]
