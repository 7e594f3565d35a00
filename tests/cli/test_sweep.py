"""A sweep: every job is run, whatever becomes of the others; it ends in a report; a stopped one goes on."""

from __future__ import annotations

import csv
import gc
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, Start, Train, result_of
from vitmnist.cli.arguments import for_hydra
from vitmnist.cli.train import main
from vitmnist.errors import ConfigError
from vitmnist.models.cnn import CNN
from vitmnist.run import build_setup
from vitmnist.runtime.signals import UNFINISHED

LOADERS = ("disk", "ram", "gpu_slice", "prefetch")
SIZES = (6, 11)


def jobs(sweep: Path) -> list[Path]:
    return sorted(sweep.glob("[0-9]*"), key=lambda folder: int(folder.name.partition("-")[0]))


def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "report.csv").open() as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_with_a_failing_job_ends_in_a_complete_report_and_goes_on(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    """Four loaders by two batch sizes; where job 5 wants its checkpoints, there is a file."""
    in_the_way = tmp_path / "here" / "5" / "checkpoints"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    swept = [f"data/loader={','.join(LOADERS)}", f"batch_size={','.join(map(str, SIZES))}"]
    ended = train_here("-m", *quick, *swept, "hydra.sweep.dir=here", "hydra.sweep.subdir=${hydra.job.num}")
    sweep = tmp_path / "here"

    assert ended.returncode == 1
    assert ended.stderr == "error: 1 of 8 jobs failed: 5\n"
    assert ended.stdout.index("job 5 failed: ") < ended.stdout.index("#6 : ")  # at once
    assert "Traceback" not in ended.stdout
    log = (sweep / "5" / "vitmnist.log").read_text()
    assert "job 5 failed: " in log
    assert "Traceback" in log
    assert "Traceback" not in (sweep / "4" / "vitmnist.log").read_text()

    results = [result_of(folder) for folder in jobs(sweep)]
    assert [result["status"] for result in results] == ["completed"] * 5 + ["failed"] + ["completed"] * 2
    assert len(rows(sweep)) == 8
    (failed,) = (row for row in rows(sweep) if row["status"] != "completed")
    assert failed["status"] == f"failed: {results[5]['error']}"
    for name in ("report.md", "report.html"):
        text = (sweep / name).read_text()
        assert "checkpoints" in text  # the reason
        assert "have the same training and evaluation losses, to the last bit" in text
    for loader in LOADERS:
        assert re.search(rf"^ *\d+ +{loader}( of ram)? .*completed", ended.stdout, re.MULTILINE), ended.stdout

    losses = {
        (result["choices"]["loader"], result["batch_size"]): [
            (epoch["train_loss"], epoch["train_acc"], epoch["eval_loss"], epoch["eval_acc"])
            for epoch in result["epochs"]
        ]
        for result in results
        if result["status"] == "completed"
    }
    assert all(losses[loader, size] == losses["disk", size] for loader, size in losses)

    in_the_way.unlink()
    before = {folder.name: files(folder / "checkpoints") for folder in jobs(sweep) if folder.name != "5"}
    refused = train_here("sweep.resume=here")
    assert "the sweep was started with 'hydra.sweep.subdir=${hydra.job.num}'; type that as well" in refused.stderr
    again = train_here("sweep.resume=here", "hydra.sweep.subdir=${hydra.job.num}")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("completed before") == 7
    assert result_of(sweep / "5")["status"] == "completed"
    assert {folder.name: files(folder / "checkpoints") for folder in jobs(sweep) if folder.name != "5"} == before
    assert [row["status"] for row in rows(sweep)] == ["completed"] * 8


def test_a_refused_job_is_a_failed_one_and_says_why(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "epochs=1", "optimizer.lr=1e30,0.001,-1", "hydra.sweep.dir=here")
    assert ended.returncode == 1
    assert "job 0 failed: the loss is" in ended.stdout
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    assert [result["status"] for result in results] == ["failed", "completed", "failed"]
    assert "learning rate 1e+30" in results[0]["error"]
    assert results[2]["error"] == "optimizer.lr=-1.0: must be above 0"
    assert [row["optimizer.lr"] for row in rows(tmp_path / "here")] == ["1e+30", "0.001", "-1"]
    again = train_here("sweep.resume=here")
    assert again.returncode == 1
    assert again.stdout.count("completed before") == 1
    assert result_of(jobs(tmp_path / "here")[2])["error"] == results[2]["error"]


def test_an_interrupted_sweep_goes_on_where_it_was(
    train: Train, start: Start, quick: list[str], tmp_path: Path
) -> None:
    swept = [*quick, "epochs=40", "batch_size=3,6", "seed=3"]
    started = start("-m", *swept, "hydra.sweep.dir=here")
    code, printed = started.until(r"#1 : [\s\S]*epoch 5/40").ended(signal.SIGINT)
    assert code == UNFINISHED
    assert "resume with\n    python train.py sweep.resume=here" in printed
    first, second = jobs(tmp_path / "here")
    assert [result_of(folder)["status"] for folder in (first, second)] == ["completed", "interrupted"]
    assert [row["status"] for row in rows(tmp_path / "here")] == ["completed", "interrupted: SIGINT was received"]

    before = files(first / "checkpoints"), (first / "result.json").read_bytes()
    again = train("sweep.resume=here")
    assert again.returncode == 0, again.stderr
    assert (files(first / "checkpoints"), (first / "result.json").read_bytes()) == before
    assert "resumed after" in again.stdout
    assert [row["status"] for row in rows(tmp_path / "here")] == ["completed", "completed, resumed"]

    assert train(*swept[:-2], "batch_size=6", "seed=3", "epochs=40", "hydra.run.dir=alone").returncode == 0
    learnt = [
        [(epoch["train_loss"], epoch["eval_loss"]) for epoch in result_of(folder)["epochs"]]
        for folder in (second, tmp_path / "alone")
    ]
    assert learnt[0] == learnt[1]


def test_repeats_are_run_in_rounds_each_in_an_order_drawn_from_the_seed(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    # Overrides may stand on both sides of an option.
    swept = [*quick, "-m", "epochs=1", "repeats=2", "batch_size=2,3,6"]
    orders = []
    for folder, seed in (("here", 1), ("again", 1), ("other", 3)):
        ended = train_here(*swept, f"seed={seed}", f"hydra.sweep.dir={folder}", "data.dataset.train_size=6")
        assert ended.returncode == 0, ended.stderr
        configs = [result_of(job)["config"] for job in jobs(tmp_path / folder)]
        assert [config["repeat"] for config in configs] == [1] * 3 + [2] * 3
        orders.append([config["batch_size"] for config in configs])
        assert [sorted(orders[-1][start : start + 3]) for start in (0, 3)] == [[2, 3, 6]] * 2
    assert orders[0] == orders[1] != orders[2]
    assert {row["runs"] for row in rows(tmp_path / "here")} == {"2"}


def test_an_experiment_is_a_sweep_by_itself(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    """With few images, and one combination of what it sweeps; the README's commands run `smoke` and `loaders` whole."""
    few = [*quick[:2], "data/loader=ram", "batch_size=23", "epochs=1", "repeats=1", "model.depth=1"]
    ended = train_here("experiment=article_table", *few, "hydra.sweep.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert [row["status"] for row in rows(tmp_path / "here")] == ["completed, first epoch only"]


def test_a_job_that_failed_leaves_no_model_to_the_next(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []

    def prepare_and_count(*arguments: object) -> object:
        alive.append(sum(type(item) is CNN for item in gc.get_objects()))
        return build_setup(*arguments)

    monkeypatch.setattr("vitmnist.run.build_setup", prepare_and_count)
    monkeypatch.setattr("vitmnist.cli.sweep._refresh_report", lambda folder: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *quick, "optimizer.lr=1e30,1e31,1e32"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert alive == [alive[0]] * 3


def test_memory_peaks_are_those_of_each_job(train: Train, tmp_path: Path) -> None:
    """A job with small batches takes as much after one with large batches as before it; on Linux with glibc."""
    few = ["data.dataset.train_size=3000", "data.dataset.test_size=100", "epochs=1", "model.depth=1"]
    ended = train("-m", *few, "seed=1,2", "batch_size=30,3000", "hydra.sweep.dir=here")
    assert ended.returncode == 0, ended.stderr
    small, large, again, _ = (result_of(folder)["epochs"][0]["host_peak_mib"] for folder in jobs(tmp_path / "here"))
    assert small is None or large - small > 2 * abs(again - small)


def test_a_sweep_that_is_refused_leaves_no_records(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "data/loader=ram,rom")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: data/loader=rom: there is no such member; did you mean 'ram'? allowed: ")
    assert ended.stderr.count("\n") == 1
    assert not [*tmp_path.rglob("result.json")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep.resume="], "is empty; name a folder such as outputs/sweeps/DATE/TIME"),
        (["sweep.resume=nowhere"], "holds no sweep over listed values; name a folder such as outputs/sweeps/DATE/TIME"),
        (["sweep.resume=single"], "holds no sweep over listed values; resume= resumes a single run"),
        (["-m", "sweep.resume=sweep", "epochs=3"], "resumes that sweep as it was started; leave out epochs=3. Only"),
    ],
)
def test_what_cannot_go_on_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "single" / ".hydra").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        for_hydra(arguments)


def test_a_sweep_that_is_running_is_left_alone(
    train_here: Train, start: Start, quick: list[str], tmp_path: Path
) -> None:
    started = start("-m", *quick, "epochs=100000", "hydra.sweep.dir=here").until("epoch 1/")
    ended = train_here("sweep.resume=here")
    assert ended.returncode == 1
    assert ended.stderr == "error: here: in use by another process; wait for it, or stop it\n"
    assert started.ended(signal.SIGTERM)[0] == UNFINISHED
    assert [row["status"] for row in rows(tmp_path / "here")] == ["interrupted: SIGTERM was received"]


def test_rounds_never_share_a_folder(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    typed = [*quick, "epochs=1", "repeats=2", "hydra.sweep.dir=here", "hydra.sweep.subdir=bs${batch_size}"]
    ended = train_here("-m", *typed)
    assert ended.returncode == 1
    assert ended.stderr == "error: 1 of 1 jobs failed: bs6\n"
    assert "job 1 failed: " in ended.stdout
    assert "holds the records of another job, with another repeat; let hydra.sweep.subdir contain" in ended.stdout
    assert result_of(tmp_path / "here" / "bs6")["config"]["repeat"] == 1


def test_a_job_of_a_sweep_goes_on_alone(train_here: Train, tiny_root: Path, quick: list[str], tmp_path: Path) -> None:
    few = ["data/dataset=kmnist", f"data.root={tiny_root}", "data.dataset.train_size=23", "data.dataset.test_size=7"]
    first = train_here(
        "experiment=smoke", *few, "data/loader=ram", "batch_size=6", "repeats=2", PLAIN, "hydra.sweep.dir=here"
    )
    assert first.returncode == 0, first.stderr
    folder = jobs(tmp_path / "here")[1]
    ended = train_here(f"resume={folder}", "epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert len(result_of(folder)["epochs"]) == 3
    assert not (tmp_path / "outputs").exists()


def test_jobs_that_failed_are_told_even_if_the_report_cannot_be_written(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    (tmp_path / "here" / "report.md").mkdir(parents=True)
    ended = train_here("-m", *quick, "optimizer.lr=1e30,-1", "hydra.sweep.dir=here")
    assert ended.returncode == 1
    assert "the report could not be written" in ended.stdout
    assert ended.stderr.startswith("error: 2 of 2 jobs failed")


def test_a_job_may_change_its_folder(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("-m", *quick, "epochs=1", "seed=1,2", "hydra.job.chdir=true", "hydra.sweep.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert "could not be written" not in ended.stdout
    assert [row["runs"] for row in rows(tmp_path / "here")] == ["2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["repeats=3"], "error: repeats=3: repeats the jobs of a sweep; type -m as well\n"),
        (["-m", "repeats=0"], "error: repeats=0: must be one whole number, at least 1\n"),
        (["-m", "repeats=1,2"], "error: repeats=1,2: must be one whole number, at least 1\n"),
        (["-m", "sweep.objective=speed"], "error: sweep.objective=speed: must be one of eval_acc, seconds_to_target\n"),
    ],
)
def test_a_mistake_gets_one_message(arguments: list[str], message: str, train_here: Train, quick: list[str]) -> None:
    ended = train_here(*arguments, *quick)
    assert (ended.returncode, ended.stderr) == (1, message)


def test_a_sweep_does_not_write_over_another(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    (tmp_path / "here" / "0").mkdir(parents=True)
    (tmp_path / "here" / "0" / "result.json").write_text(json.dumps({}))
    ended = train_here("-m", *quick, "seed=1,2", "hydra.sweep.dir=here")
    assert ended.returncode == 1
    assert "name another folder, or resume with sweep.resume=FOLDER" in ended.stderr
