"""What a run folder or checkpoint of somebody else says is data: it starts nothing, and names no secret."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import CallHere, Printed, Train
from tests.support.processes import TrainProcess
from vitmnist.checkpoint import storage
from vitmnist.cli import evaluate, report, status
from vitmnist.cli.arguments import for_hydra
from vitmnist.errors import ConfigError


@pytest.fixture(scope="module")
def swept(stateful: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of two jobs."""
    folder = tmp_path_factory.mktemp("foreign")
    assert TrainProcess(folder, "-m", *stateful, "seed=1,2", "hydra.sweep.dir=swept").ended()[0] == 0
    return folder / "swept"


def popen(marker: Path) -> str:
    """An override that would create a file when Hydra instantiates it."""
    return f"+hydra.callbacks.x={{_target_:psutil.Popen,args:[touch,{marker}]}}"


def replace_overrides(folder: Path, lines: list[str]) -> None:
    file = folder / ".hydra" / "overrides.yaml"
    file.write_text(yaml.safe_dump([*yaml.safe_load(file.read_text()), *lines]))


def add_to_checkpoint(folder: Path, lines: list[str]) -> None:
    """Leave nothing but a checkpoint with a correct checksum."""
    state = storage.load(folder)
    assert state is not None
    shutil.rmtree(folder / ".hydra")
    (folder / "result.json").unlink()
    storage.save(folder, {**state, "overrides": lines})


def add_hydra_section(folder: Path, lines: list[str]) -> None:
    file = folder / ".hydra" / "config.yaml"
    target = {"_target_": "psutil.Popen", "args": ["touch", lines[0].partition("touch,")[2].rstrip("]}")]}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"hydra": {"callbacks": {"x": target}}}))


@pytest.mark.parametrize("change", [replace_overrides, add_to_checkpoint, add_hydra_section])
@pytest.mark.parametrize(
    "typed", [["resume=outputs/runs/a/b"], ["resume=auto"], ["resume=auto", "hydra.run.dir=outputs/runs/a/b"]]
)
def test_a_copied_run_executes_nothing(
    change: Callable[[Path, list[str]], None],
    typed: list[str],
    runs: Path,
    stateful: list[str],
    train_here: Train,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "outputs" / "runs" / "a" / "b"
    shutil.copytree(runs / "cut", folder)
    change(folder, [popen(tmp_path / "marker"), "--help"])
    ended = train_here(*(stateful if "resume=auto" in typed else []), *typed, "max_minutes=null")
    assert "Traceback" not in ended.stderr
    assert "Configuration groups" not in ended.stdout
    assert ended.returncode == (1 if change is add_to_checkpoint and typed != ["resume=auto"] else 0), ended.stderr
    assert not (tmp_path / "marker").exists()


HOSTILE = (
    "hydra/callbacks=evil",
    "hydra.searchpath=[file:///tmp]",
    "+hydra.launcher._target_=psutil.Popen",
    "hydra.launcher.setup=[reboot]",
    "hydra.launcher.python=reboot",
    "hydra.sweeper.custom_search_space=os.abort",
    "hydra/launcher=../../evil",
    "hydra/launcher@hydra.callbacks.x=basic",
    "hydra.job_logging.handlers.file.class=os.abort",
    "hydra.output_subdir=../..",
)
HOSTILE_TO_JOBS = (
    "model=../../evil",
    "experiment=/tmp/evil",
    "model@hydra.callbacks.x=vit",
    "experiment@hydra.callbacks=smoke",
    "data.root=${oc.env:SECRET}",
    r"data.root=$\{oc.env:SECRET\}",
    r"seed=choice(1,$\{oc.env:SECRET\})",
    "seed=glob(*)",
    "resume=/tmp",
    "seed=range(1,100000000)",
    "repeats=100000000",
    "--config-dir=/tmp",
    "--help",
    "-m",
)


def test_a_sweep_takes_only_its_own_keys_from_its_record(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Train
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(swept, tmp_path / "swept")
    file = tmp_path / "swept" / "multirun.yaml"
    recorded = yaml.safe_load(file.read_text())
    task, of_hydra = (recorded["hydra"]["overrides"][key] for key in ("task", "hydra"))
    taken = [*task, "hydra/launcher=basic", "hydra.launcher.n_jobs=2"]
    recorded["hydra"]["overrides"] = {
        "task": task,
        "hydra": [*of_hydra, *taken[-2:], *HOSTILE, popen(tmp_path / "marker")],
    }
    file.write_text(yaml.safe_dump(recorded))
    again = ["hydra.sweep.dir='swept'", "hydra.mode=MULTIRUN"]
    assert for_hydra(["sweep.resume=swept"])[0] == [*taken, *again]
    for line in (*HOSTILE_TO_JOBS, popen(tmp_path / "marker")):
        recorded["hydra"]["overrides"] = {"task": [*task, line], "hydra": of_hydra}
        file.write_text(yaml.safe_dump(recorded))
        ended = train_here("sweep.resume=swept")
        assert "Traceback" not in ended.stderr
        refused = ("cannot be resumed; start a new sweep", "note: ignored", "has more than 10,000 jobs")
        assert any(one in ended.stderr for one in refused), line
    assert not (tmp_path / "marker").exists()


def test_the_name_of_a_folder_is_not_resolved(
    runs: Path, swept: Path, stateful: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Train
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    folder = tmp_path / "outputs" / "runs" / "a" / "${oc.env:SECRET}"
    shutil.copytree(runs / "cut", folder)
    shutil.copytree(swept, tmp_path / "${oc.env:SECRET}")
    named = [train_here(f"resume={folder}"), train_here("sweep.resume=${oc.env:SECRET}")]
    assert all("must not contain control characters or ${; rename it" in one.stderr for one in named)
    begun = train_here(*stateful, "resume=auto", "max_minutes=0")
    assert "a new one begins" in begun.stdout
    assert "hunter2" not in "".join(one.stdout + one.stderr for one in (*named, begun))
    assert not [path for path in tmp_path.rglob("*") if "hunter2" in path.name]


def test_a_secret_that_a_record_names_is_never_printed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Train, call_here: CallHere
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    shutil.copytree(runs / "cut", tmp_path / "cut")
    file = tmp_path / "cut" / ".hydra" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"device": "${oc.env:SECRET}"}))
    (tmp_path / "cut" / "result.json").unlink()
    ended = [
        train_here("resume=cut"),
        call_here(evaluate.main, "cut"),
        call_here(report.main, "."),
        call_here(status.main, "."),
    ]
    assert "cut/.hydra/config.yaml: contains an interpolation, and a record has plain values only" in ended[0].stderr
    assert "hunter2" not in "".join(one.stdout + one.stderr for one in ended)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def as_link(file: Path, elsewhere: Path) -> None:
    if file.exists():
        file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["checkpoints", ".hydra", "vitmnist.log"])
def test_a_run_writes_through_no_link(name: str, runs: Path, refuse: Printed, tmp_path: Path) -> None:
    shutil.copytree(runs / "cut", tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    as_link(tmp_path / "run" / name, elsewhere)
    before = {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.glob("*"))}
    printed = refuse("resume=run", "max_minutes=null")
    assert printed == f"error: run/{name}: is a symbolic link; replace it by what it points to\n"
    assert {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.glob("*"))} == before


def test_a_sweep_writes_through_no_link_and_waits_for_no_fifo(swept: Path, tmp_path: Path, refuse: Printed) -> None:
    """Hydra opens the log of a job before the job can check anything."""
    copied, elsewhere = tmp_path / "swept", tmp_path / "elsewhere"
    job = next(folder.name for folder in swept.glob("0-*"))
    for file in ("optimization_results.yaml", "multirun.yaml", job, f"{job}/vitmnist.log"):
        shutil.copytree(swept, copied)
        (copied / job / "result.json").unlink()
        as_link(copied / file, elsewhere)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        printed = refuse("sweep.resume=swept")
        assert printed.endswith(f"error: swept/{file}: is a symbolic link; replace it by what it points to\n")
        changed = [path for path, content in before.items() if path.read_bytes() != content]
        assert [path.name for path in changed if path.is_relative_to(elsewhere)] == []
        shutil.rmtree(copied)
        shutil.rmtree(elsewhere, ignore_errors=True)
        elsewhere.unlink(missing_ok=True)
    shutil.copytree(swept, copied)
    (copied / job / "vitmnist.log").unlink()
    os.mkfifo(copied / job / "vitmnist.log")
    assert "is neither a file nor a folder; remove it" in refuse("sweep.resume=swept")


def test_a_damaged_configuration_is_taken_from_the_checkpoint(runs: Path, tmp_path: Path, train_here: Train) -> None:
    shutil.copytree(runs / "cut", tmp_path / "cut")
    file = tmp_path / "cut" / ".hydra" / "config.yaml"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    ended = train_here("resume=cut", "max_minutes=null")
    assert ended.returncode == 0, ended.stderr
    assert "is missing; type" in ended.stderr
    assert "its checkpoint has the configuration" in ended.stderr


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
    ids=repr,
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
    ids=repr,
)
def test_a_model_that_does_not_fit_its_weights_is_not_built(
    change: dict[str, Any], runs: Path, tmp_path: Path, call_here: CallHere
) -> None:
    folder = shutil.copytree(next((runs / "swept").glob("0-*")), tmp_path / "run")
    file = folder / "checkpoints" / "final.safetensors"
    with safe_open(file, framework="pt") as opened:
        info = json.loads(opened.metadata()["vitmnist"])
    save_file(load_file(file), file, {"vitmnist": json.dumps(info | change)})
    ended = call_here(evaluate.main, "run")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: run/checkpoints/final.safetensors: is damaged, or not of this version")
    assert ended.stderr[:-1].isprintable()


def resumed_sweep(runs: Path, folder: Path, task: list[str], of_hydra: list[str]) -> Path:
    """A copy of the sweep with overrides added to its record, as `swept`."""
    shutil.copytree(runs / "swept", folder / "swept")
    file = folder / "swept" / "multirun.yaml"
    recorded = yaml.safe_load(file.read_text())
    recorded["hydra"]["overrides"]["task"] += task
    recorded["hydra"]["overrides"]["hydra"] += of_hydra
    file.write_text(yaml.safe_dump(recorded))
    return file


def test_a_recorded_launcher_starts_no_more_processes_than_there_are_cores(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    numbers = ["n_jobs=4", "n_jobs=-1", "timeout_min=600", "n_jobs=5", "n_jobs=nan", "ray.init.num_cpus=1e9"]
    resumed_sweep(runs, tmp_path, [], [f"hydra.launcher.{one}" for one in numbers])
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
    lines: list[str], message: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resumed_sweep(runs, tmp_path, lines, [])
    with pytest.raises(ConfigError, match=rf"^swept/multirun\.yaml: .*{message}"):
        for_hydra(["sweep.resume=swept"])


def test_a_record_starts_no_search(runs: Path, tmp_path: Path, train_here: Train) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    resumed_sweep(runs, tmp_path, [], ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1000000000"])
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
    runs: Path, tiny_root: Path, tmp_path: Path, train_here: Train
) -> None:
    group = tmp_path / "outputs" / "runs" / "a"
    for name in ("good", "linked", "gone", "${x}", "\x1bx"):
        shutil.copytree(runs / "cut", group / name)
    (group / "linked" / "vitmnist.log").unlink(missing_ok=True)
    (group / "linked" / "vitmnist.log").symlink_to(tmp_path / "elsewhere")
    (group / "gone" / "checkpoints" / "last.pt").unlink()
    (group / "gone" / "checkpoints" / "last.pt").symlink_to("nowhere")
    ended = train_here(*overrides_for(tiny_root), "resume=auto", "max_minutes=0")
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


def test_a_sweep_over_a_long_list_is_resumed(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seeds = "seed=" + ",".join(map(str, range(1500)))
    resumed_sweep(runs, tmp_path, [seeds], [])
    assert seeds in for_hydra(["sweep.resume=swept"])[0]
