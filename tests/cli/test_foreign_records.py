"""What a run folder or checkpoint of somebody else says is data: it starts nothing, and names no secret."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import CallHere, Printed, Train
from vitmnist.checkpoint import storage
from vitmnist.cli import evaluate, report, status
from vitmnist.cli.arguments import for_hydra


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
    "hydra.launcher._target_=1",
    "+hydra.sweeper.params.hydra.verbose=1",
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
        refused = ("cannot be resumed; start a new sweep", "note: ignored")
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
