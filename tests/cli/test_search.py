"""A search by Optuna: over the space of `conf/hparams_search/`, judged by held-out images; it is resumed as a sweep."""

import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Printed, Start, Train, assert_same_run, result_of
from tests.support.outputs import jobs
from tests.support.processes import REPOSITORY, SIGKILL, hide_optuna
from vitmnist.errors import ExitCode
from vitmnist.tracking.runs import read_run

LR = "optimizer.lr=tag(log, interval(0.0001, 0.01))"
TYPED = ["hydra/sweeper=optuna", "hydra.mode=MULTIRUN", "hydra.sweep.subdir=${hydra.job.num}"]


@pytest.fixture
def trial(quick: list[str]) -> list[str]:
    """Overrides for a short trial, evaluated on 5 of 23 images."""
    return [*quick, "data.holdout=5", "epochs=1", "hydra.sweep.dir=here"]


def trials_of(sweep: Path, metric: str = "eval_acc") -> list[tuple[str, list[str], float | None]]:
    """The status, the overrides and the value of each trial."""
    runs = [read_run(folder) for folder in jobs(sweep)]
    return [(run.result.status, run.result.overrides, run.value_of(metric)) for run in runs]


def best_of(sweep: Path) -> dict[str, Any]:
    """The parameters and the value of the best trial."""
    return yaml.safe_load((sweep / "optimization_results.yaml").read_text())


def test_a_search_is_for_any_metric_has_held_out_images_and_keeps_what_is_typed(
    succeed: Printed, trial: list[str], tmp_path: Path
) -> None:
    typed = ["hparams_search=accuracy", "optimizer.lr=0.002", "schedule.warmup=choice(0.1,0.2)", "monitor=loss"]
    succeed(*typed, *trial, "hydra.sweeper.n_trials=3", "epochs=3")
    space = yaml.safe_load((REPOSITORY / "conf" / "hparams_search" / "accuracy.yaml").read_text())["hydra"]["sweeper"]
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    sizes = [(result["dataset"]["train_size"], result["dataset"]["validation_size"]) for result in results]
    assert sizes == [(18, 5)] * 3
    assert {result["config"]["optimizer"]["lr"] for result in results} == {0.002}
    assert {result["config"]["schedule"]["warmup"] for result in results} <= {0.1, 0.2}
    values = [min(epoch["eval_loss"] for epoch in result["epochs"]) for result in results]
    best = best_of(tmp_path / "here")
    assert best["best_value"] == min(values) == values[best["best_trial"]]
    assert set(best["best_params"]) == set(space["params"]) - {"optimizer.lr"}


def test_whole_numbers_and_groups_are_searched(succeed: Printed, trial: list[str], tmp_path: Path) -> None:
    """Without a validation split, by the value of the last epoch. The report has the best value."""
    searched = ["batch_size=tag(int, interval(3, 9))", "optimizer=adam,sgd", "data.holdout=null", "epochs=3"]
    printed = succeed(*TYPED, *trial, *searched, "hydra.sweeper.n_trials=3")
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    values = [result["epochs"][-1]["eval_acc"] for result in results]
    best = best_of(tmp_path / "here")
    assert best["best_value"] == max(values)
    assert results[best["best_trial"]]["config"]["batch_size"] == best["best_params"]["batch_size"]
    assert results[best["best_trial"]]["config"]["optimizer"]["name"] == best["best_params"]["optimizer"]
    assert all(3 <= result["config"]["batch_size"] <= 9 for result in results)
    for text in (printed, *((tmp_path / "here" / name).read_text() for name in ("report.md", "report.html"))):
        assert f"{best['best_value']:.2f}" in text


@pytest.mark.slow
def test_failed_trials_end_no_search(refuse: Printed, train_here: Train, trial: list[str], tmp_path: Path) -> None:
    search = [*TYPED, *trial, "optimizer.lr=choice(1e30,0.01)", "hydra.sweeper.n_trials=4"]
    assert "of 4 jobs failed" in refuse(*search)
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    ends = {(result["status"], result["config"]["optimizer"]["lr"]) for result in results}
    assert ends == {("failed", 1e30), ("completed", 0.01)}
    assert best_of(tmp_path / "here")["best_params"]["optimizer.lr"] == "0.01"
    trials = trials_of(tmp_path / "here")
    again = train_here(*search, "resume=auto")
    assert (again.returncode, "train loss" in again.stdout) == (1, False), "no trial is repeated"
    assert trials_of(tmp_path / "here") == trials
    ended = train_here(*search, "optimizer.lr=choice(1e30,1e31)", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=other")
    assert (ended.returncode, ended.stderr) == (1, "error: 1 of 1 jobs failed: 0\n")
    assert not (tmp_path / "other" / "optimization_results.yaml").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_search_is_resumed(
    signum: int, succeed: Printed, start: Start, trial: list[str], tmp_path: Path
) -> None:
    search = [*TYPED, *trial, "epochs=12", "checkpoint.min_interval_s=0", LR, "hydra.sweeper.n_trials=3"]
    succeed(*search, "hydra.sweep.dir=whole")
    sweep, command = tmp_path / "cut", [*search, "hydra.sweep.dir=cut", "resume=auto"]
    code, printed = start(*command[:-1]).until(r"#1 : [\s\S]*epoch 2/12").ended(signum)
    if signum == signal.SIGTERM:
        assert code == ExitCode.UNFINISHED
        assert [state for state, _, _ in trials_of(sweep)] == ["completed", "interrupted"]
        command = shlex.split(*re.findall(r"resume with\n    python train.py (.*)", printed))
    printed = succeed(*command)
    assert "resumed after" in printed
    assert printed.count(": completed, epoch 12/12") == 1
    assert trials_of(tmp_path / "whole") == trials_of(sweep), "a trial keeps its values"
    assert best_of(tmp_path / "whole") == best_of(sweep)
    for resumed, whole in zip(jobs(sweep), jobs(tmp_path / "whole"), strict=True):
        assert_same_run(resumed, whole)


def test_trials_are_added_to_a_search(succeed: Printed, trial: list[str], tmp_path: Path) -> None:
    search = [*TYPED, *trial, LR, "hydra.sweeper.n_jobs=2"]
    succeed(*search, "hydra.sweeper.n_trials=2")
    before = trials_of(tmp_path / "here")
    printed = succeed(TYPED[0], LR, *search[1:], "hydra.sweeper.n_trials=3", "resume=auto")  # in another order
    assert printed.count(": completed, epoch 1/1") == 2
    assert trials_of(tmp_path / "here")[:2] == before
    assert len(trials_of(tmp_path / "here")) == 3


def test_a_search_waits_for_a_trial_that_can_be_resumed(train_here: Train, trial: list[str], tmp_path: Path) -> None:
    """The values of the trials after it depend on its result."""
    ended = train_here(*TYPED, *trial, LR, "max_minutes=0", "hydra.sweeper.n_trials=3")
    assert ended.returncode == ExitCode.UNFINISHED, ended.stderr
    assert "1 of 1 jobs are unfinished: 0" in ended.stdout


def test_optuna_is_imported_by_a_search_only(trial: list[str], start: Start, tmp_path: Path) -> None:
    assert start("-m", *trial, "seed=1", before=hide_optuna).ended()[0] == 0
    search = ["-m", *trial, "seed=1", LR, "hydra/sweeper=optuna", "hydra.sweep.dir=other"]
    message = "error: hydra/sweeper=optuna is not installed; run pip install 'vitmnist[search]'\n"
    assert start(*search, before=hide_optuna).ended() == (1, message)
    assert not jobs(tmp_path / "other")
