"""A sweep: every job is run, even if others fail; it ends in a report; a stopped one continues."""

import gc
import re
import shlex
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydra_plugins.vitmnist_sweepers import RoundsSweeper
from tests.conftest import Printed, Start, Train, assert_same_run, result_of
from tests.support.outputs import jobs, rows
from vitmnist.errors import ExitCode
from vitmnist.models.cnn import CNN
from vitmnist.trainer import Trainer

LOADERS = ("disk", "ram", "prefetch")


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def order(seed: int, sizes: tuple[int, ...] = (6, 11, 23)) -> list[tuple[int, int]]:
    """Repeat and batch size of each job of two rounds over some batch sizes, in their order."""
    sweeper = RoundsSweeper.__new__(RoundsSweeper)  # Hydra imports its base class again; `__init__` is the old one's
    sweeper.config, sweeper.batch_index = OmegaConf.create({"seed": seed}), 0
    sweeper.overrides = [[[f"repeat={repeat}", f"batch_size={size}"] for repeat in (1, 2) for size in sizes]]
    return [tuple(int(override.partition("=")[2]) for override in job) for job in sweeper.get_job_batch()]


def test_a_sweep_with_a_failing_job_ends_in_a_complete_report_and_is_resumed(
    train_here: Train, succeed: Printed, refuse: Printed, quick: list[str], tmp_path: Path
) -> None:
    """Where job 1 wants its checkpoints, there is a file."""
    sweep, by_number = tmp_path / "here", "hydra.sweep.subdir=${hydra.job.num}"
    typed = ["-m", *quick, f"data/loader={','.join(LOADERS)}", "hydra.sweep.dir=here", by_number]
    in_the_way = sweep / "1" / "checkpoints"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    ended = train_here(*typed)

    assert ended.returncode == 1
    assert ended.stderr == "error: 1 of 3 jobs failed: 1\n"
    assert ended.stdout.index("job 1 failed: ") < ended.stdout.index("#2 : ")  # at once
    assert "Traceback" not in ended.stdout
    assert "job 1 failed: " in (sweep / "1" / "vitmnist.log").read_text()

    results = [result_of(folder) for folder in jobs(sweep)]
    assert [result["status"] for result in results] == ["completed", "failed", "completed"]
    assert len(rows(sweep)) == 3
    (failed,) = (row for row in rows(sweep) if row["status"] != "completed")
    assert failed["status"] == f"failed: {results[1]['error']}"
    for name in ("report.md", "report.html"):
        assert "checkpoints" in (sweep / name).read_text(), "the reason"
    for loader in LOADERS:
        assert re.search(rf"^ *{loader}( of ram)? .*(completed|failed)", ended.stdout, re.MULTILINE), ended.stdout

    in_the_way.unlink()
    before = {folder.name: files(folder / "checkpoints") for folder in jobs(sweep) if folder.name != "1"}
    assert "holds records already" in refuse(*typed)
    assert succeed(*typed, "resume=auto").count(": completed, epoch 2/2") == 2
    assert result_of(sweep / "1")["status"] == "completed"
    assert {folder.name: files(folder / "checkpoints") for folder in jobs(sweep) if folder.name != "1"} == before
    assert [row["status"] for row in rows(sweep)] == ["completed"] * 3
    losses = [[(epoch["train_loss"], epoch["eval_loss"]) for epoch in result_of(job)["epochs"]] for job in jobs(sweep)]
    assert losses == [losses[0]] * 3, "by all loaders"


def test_a_refused_job_is_a_failed_one_and_says_why(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "epochs=1", "optimizer.lr=1e30,0.001,-1", "hydra.sweep.dir=here")
    assert ended.returncode == 1
    assert "job 0 failed: the loss is" in ended.stdout
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    assert [result["status"] for result in results] == ["failed", "completed", "failed"]
    assert "learning rate 1e+30" in results[0]["error"]
    assert (results[2]["error"], results[2]["epochs"]) == ("optimizer.lr=-1.0: must be above 0", [])
    assert results[2]["began_at"] <= results[2]["ended_at"]
    assert [row["optimizer.lr"] for row in rows(tmp_path / "here")] == ["1e+30", "0.001", "-1"]


def test_an_interrupted_sweep_is_resumed(succeed: Printed, start: Start, quick: list[str], tmp_path: Path) -> None:
    started = start("-m", *quick, "epochs=1,20,2", "seed=3", "hydra.sweep.dir=here")
    code, printed = started.until(r"#1 : [\s\S]*epoch 5/20").ended(signal.SIGINT)
    assert code == ExitCode.UNFINISHED
    (command,) = re.findall(r"resume with\n    python train.py (.*)", printed)
    assert "Traceback" not in printed
    first, second = jobs(tmp_path / "here")  # the third was not begun
    assert (first.name, second.name) == ("0-epochs_1", "1-epochs_20")
    assert [result_of(folder)["status"] for folder in (first, second)] == ["completed", "interrupted"]
    assert [row["status"] for row in rows(tmp_path / "here")][1] == "interrupted: SIGINT was received"

    before = files(first / "checkpoints"), (first / "result.json").read_bytes()
    assert "resumed after" in succeed(*shlex.split(command))
    assert (files(first / "checkpoints"), (first / "result.json").read_bytes()) == before
    assert [result_of(folder)["status"] for folder in jobs(tmp_path / "here")] == ["completed"] * 3
    assert rows(tmp_path / "here")[1]["status"] == "completed, resumed"
    succeed(*quick, "epochs=20", "seed=3", "hydra.run.dir=alone")
    assert_same_run(second, tmp_path / "alone")


def test_a_job_whose_time_is_over_does_not_end_the_sweep(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "max_minutes=0,null", "hydra.sweep.dir=here")
    assert ended.returncode == ExitCode.UNFINISHED, ended.stderr
    assert "1 of 2 jobs are unfinished: 0-" in ended.stdout
    assert [result_of(folder)["status"] for folder in jobs(tmp_path / "here")] == ["interrupted", "completed"]


def test_repeats_run_in_rounds_of_an_order_drawn_by_seed(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    # Overrides may stand on both sides of an option, and a job may change its folder.
    few = ["epochs=1", "repeats=2", "batch_size=6,11", "seed=1"]
    printed = succeed(*quick, "-m", *few, "hydra.sweep.dir=here", "hydra.job.chdir=true")
    assert "could not be written" not in printed
    configs = [result_of(job)["config"] for job in jobs(tmp_path / "here")]
    assert [(config["repeat"], config["batch_size"]) for config in configs] == order(1, (6, 11))
    assert {row["runs"] for row in rows(tmp_path / "here")} == {"2"}
    drawn = [order(seed) for seed in range(10)]
    assert len({*map(tuple, drawn)}) > 5
    rounds = [[(repeat, size) for size in (6, 11, 23)] for repeat in (1, 2)]
    assert all([sorted(jobs_of_sweep[:3]), sorted(jobs_of_sweep[3:])] == rounds for jobs_of_sweep in drawn)


def test_an_experiment_is_a_sweep_whose_jobs_can_be_resumed(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    """With few images, and one combination of what it sweeps; the README's commands run `smoke` and `loaders` whole."""
    few = [*quick[:2], "data/loader=ram", "batch_size=23", "epochs=1", "repeats=1", "model.depth=1"]
    succeed("experiment=article_table", *few, "hydra.sweep.dir=here")
    assert [row["status"] for row in rows(tmp_path / "here")] == ["completed, first epoch only"]
    (folder,) = jobs(tmp_path / "here")
    succeed(f"resume={folder}", "epochs=2")
    assert len(result_of(folder)["epochs"]) == 2
    assert not (tmp_path / "outputs").exists()


def test_a_failed_job_leaves_no_model(quick: list[str], refuse: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []

    def count(trainer: Trainer) -> object:
        alive.append(sum(type(item) is CNN for item in gc.get_objects()))
        return build_data(trainer)

    build_data = Trainer.build_data
    monkeypatch.setattr(Trainer, "build_data", count)
    monkeypatch.setattr("vitmnist.cli.sweep._write_report", lambda folder: None)
    refuse("-m", *quick, "optimizer.lr=1e30,1e31")
    assert alive == [alive[0]] * 2


def test_jobs_that_differ_never_share_a_folder(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "epochs=1", "seed=1,2", "hydra.sweep.dir=here", "hydra.sweep.subdir=same")
    assert (ended.returncode, ended.stderr) == (1, "error: 1 of 1 jobs failed: same\n")
    assert "job 1 failed: resume: the run began with another configuration: seed=2 (it was 1)" in ended.stdout
    assert result_of(tmp_path / "here" / "same")["config"]["seed"] == 1
