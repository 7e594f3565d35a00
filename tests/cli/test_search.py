"""A search by Optuna: over the space of `conf/hparams_search/`, judged by held-out images; it is resumed as a sweep."""

from __future__ import annotations

import os
import re
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend

from tests.cli.test_sweep import jobs
from tests.conftest import REPOSITORY, Printed, Start, Train, assert_same_run, result_of
from tests.support.processes import hide_optuna
from vitmnist.errors import ExitCode

LR = "optimizer.lr=tag(log, interval(0.0001, 0.01))"
TYPED = ["hydra/sweeper=optuna", "hydra.mode=MULTIRUN", "hydra.sweep.subdir=${hydra.job.num}"]


@pytest.fixture
def quick(quick: list[str]) -> list[str]:
    """Overrides for short trials, evaluated on 5 of 23 images."""
    return [*quick, "data.holdout=5", "epochs=1", "hydra.sweep.dir=here"]


def study_of(sweep: Path) -> optuna.Study:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep / "search.jsonl")))
    return optuna.load_study(study_name=None, storage=storage)


def trials_of(sweep: Path) -> list[tuple[str, dict[str, Any], float | None]]:
    return [(trial.state.name, trial.params, trial.value) for trial in study_of(sweep).trials]


def best_of(sweep: Path) -> dict[str, Any]:
    """The parameters and the value of the best trial."""
    return yaml.safe_load((sweep / "optimization_results.yaml").read_text())


def test_a_search_ends_in_the_best_of_its_trials(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    printed = succeed("hparams_search=accuracy", *quick, "hydra.sweeper.n_trials=2")
    space = yaml.safe_load((REPOSITORY / "conf" / "hparams_search" / "accuracy.yaml").read_text())["hydra"]["sweeper"]
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    assert [(one["dataset"]["train_size"], one["dataset"]["validation_size"]) for one in results] == [(18, 5)] * 2
    best = best_of(tmp_path / "here")
    assert set(best["best_params"]) == set(space["params"])
    assert best["best_value"] == max(result["epochs"][-1]["eval_acc"] for result in results)
    sentence = (
        f"Best of 2 trials by eval_acc: {best['best_value']:g} % in trial {best['best_trial']}, with optimizer.lr="
    )
    assert sentence in printed
    for name in ("report.md", "report.html"):
        assert sentence in (tmp_path / "here" / name).read_text()


def test_a_search_is_for_any_metric_and_keeps_what_is_typed(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    typed = ["hparams_search=accuracy", "optimizer.lr=0.002", "schedule.warmup=choice(0.1,0.2)", "sweep.objective=loss"]
    succeed(*typed, *quick, "hydra.sweeper.n_trials=3", "epochs=3")
    trials, results = trials_of(tmp_path / "here"), [result_of(folder) for folder in jobs(tmp_path / "here")]
    assert {result["config"]["optimizer"]["lr"] for result in results} == {0.002}
    assert {result["config"]["schedule"]["warmup"] for result in results} <= {0.1, 0.2}
    for (_, params, value), result in zip(trials, results, strict=True):
        assert "optimizer.lr" not in params
        assert result["config"]["sweep"] == {"objective": "loss"}
        best = max(result["epochs"], key=lambda epoch: epoch["eval_acc"])  # the first of the highest
        assert value == best["eval_loss"], "after the best epoch, as `monitor` says"
    assert best_of(tmp_path / "here")["best_value"] == min(value for _, _, value in trials)


def test_whole_numbers_and_groups_are_searched(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    """Without a validation split, by the value of the last epoch."""
    searched = ["batch_size=tag(int, interval(3, 9))", "optimizer=adam,sgd", "data.holdout=null", "epochs=3"]
    succeed(*TYPED, *quick, *searched, "hydra.sweeper.n_trials=3")
    results = [result_of(folder) for folder in jobs(tmp_path / "here")]
    tried = [params for _, params, _ in trials_of(tmp_path / "here")]
    assert [value for _, _, value in trials_of(tmp_path / "here")] == [one["epochs"][-1]["eval_acc"] for one in results]
    assert [(one["batch_size"], one["choices"]["optimizer"]) for one in results] == [
        (params["batch_size"], params["optimizer"]) for params in tried
    ]


def test_failed_trials_end_no_search(refuse: Printed, train_here: Train, quick: list[str], tmp_path: Path) -> None:
    search = [*TYPED, *quick, "optimizer.lr=choice(1e30,0.01)", "hydra.sweeper.n_trials=4"]
    assert "of 4 jobs failed" in refuse(*search)
    trials = trials_of(tmp_path / "here")
    assert {(state, params["optimizer.lr"]) for state, params, _ in trials} == {("FAIL", "1e+30"), ("COMPLETE", "0.01")}
    assert best_of(tmp_path / "here")["best_params"]["optimizer.lr"] == "0.01"
    again = train_here(*search, "resume=auto")
    assert (again.returncode, "epoch 1/1" in again.stdout) == (1, False), "no trial is repeated"
    assert trials_of(tmp_path / "here") == trials
    ended = train_here(*search, "optimizer.lr=choice(1e30,1e31)", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=other")
    assert (ended.returncode, ended.stderr) == (1, "error: 1 of 1 jobs failed: 0\n")
    assert "No trial has a value of eval_acc." in ended.stdout


def test_an_interrupted_search_is_resumed(succeed: Printed, start: Start, quick: list[str], tmp_path: Path) -> None:
    search = [*TYPED, *quick, "epochs=20", "checkpoint.min_interval_s=0", LR, "hydra.sweeper.n_trials=3"]
    code, printed = start(*search).until(r"#1 : [\s\S]*epoch 5/20").ended(signal.SIGTERM)
    assert code == ExitCode.UNFINISHED
    before = trials_of(tmp_path / "here")
    assert [state for state, _, _ in before] == ["COMPLETE", "RUNNING"]
    (command,) = re.findall(r"resume with\n    python train.py (.*)", printed)
    printed = succeed(*shlex.split(command))
    assert "resumed after" in printed
    assert "#0 : " not in printed
    after = trials_of(tmp_path / "here")
    assert (after[0], after[1][1]) == (before[0], before[1][1]), "a trial keeps its values"
    succeed(*search, "hydra.sweep.dir=whole")
    assert trials_of(tmp_path / "whole") == after
    for one, other in zip(jobs(tmp_path / "here"), jobs(tmp_path / "whole"), strict=True):
        assert_same_run(one, other)


def kill_at_first_line(is_written: bool) -> None:
    """Kill the program before or after it writes the first line of the journal."""

    def append(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        if is_written:
            written(self, logs)
            os.symlink(self._file_path, f"{self._file_path}.lock")  # as one leaves it that is killed while it writes
        os.kill(os.getpid(), signal.SIGKILL)

    written, JournalFileBackend.append_logs = JournalFileBackend.append_logs, append


def test_a_killed_search_loses_no_trial(succeed: Printed, start: Start, quick: list[str], tmp_path: Path) -> None:
    """The steps: the search is begun; for each trial: it is begun, its job has ended, its value is recorded."""
    search = [*TYPED, *quick, LR, "hydra.sweeper.n_trials=2"]
    printed = ""
    for _ in range(5):
        for is_written in (False, True):
            killed = start(*search, "resume=auto", before=partial(kill_at_first_line, is_written))
            code, output = killed.ended()
            assert code == -signal.SIGKILL, output
            printed += output
    assert [state for state, _, _ in trials_of(tmp_path / "here")] == ["COMPLETE"] * 2
    assert "epoch 1/1" not in succeed(*search, "resume=auto")
    assert printed.count("epoch 1/1") == 2
    assert len(jobs(tmp_path / "here")) == 2
    succeed(*search, "hydra.sweep.dir=whole")
    assert trials_of(tmp_path / "whole") == trials_of(tmp_path / "here")
    assert best_of(tmp_path / "whole") == best_of(tmp_path / "here")


def test_trials_are_added_to_a_search(succeed: Printed, train_here: Train, quick: list[str], tmp_path: Path) -> None:
    """Two trials are proposed together, so the launcher gets both again, although one has ended."""
    search = [*TYPED, *quick, "epochs=2", "max_minutes=0,1000", "hydra.sweeper.n_jobs=2"]
    ended = train_here(*search, "hydra.sweeper.n_trials=4")
    before = trials_of(tmp_path / "here")
    states = {"0": "RUNNING", "1000": "COMPLETE"}
    assert [state for state, _, _ in before] == [states[params["max_minutes"]] for _, params, _ in before]
    assert {params["max_minutes"] for _, params, _ in before} == {"0", "1000"}
    assert (ended.returncode, "of 4 jobs are unfinished" in ended.stdout) == (ExitCode.UNFINISHED, True)
    ended = train_here(*search, "hydra.sweeper.n_trials=6", "resume=auto")
    assert trials_of(tmp_path / "here")[:4] == before
    assert len(trials_of(tmp_path / "here")) == 6


def test_another_search_is_refused(succeed: Printed, refuse: Printed, quick: list[str], tmp_path: Path) -> None:
    search = [*TYPED, *quick, LR, "hydra.sweeper.n_trials=1"]
    succeed(*search)
    before = trials_of(tmp_path / "here")
    for other, named in {
        "sweep.objective=loss": "sweep.objective",
        "optimizer.lr=interval(0.1,0.2)": "optimizer.lr",
        "model.width=8": "model.width",
    }.items():
        assert f"here: holds a search with another {named}; type the same" in refuse(*search, "resume=auto", other)
    with (tmp_path / "here" / "search.jsonl").open("a") as journal:
        journal.write('{"op_code":4,')  # a full disk cuts a line
    succeed(TYPED[0], LR, *TYPED[1:], *quick, "hydra.sweeper.n_trials=2", "resume=auto")  # in another order
    assert trials_of(tmp_path / "here")[:1] == before
    assert len(trials_of(tmp_path / "here")) == 2


def test_optuna_is_imported_by_a_search_only(quick: list[str], start: Start, tmp_path: Path) -> None:
    assert start("-m", *quick, "seed=1", before=hide_optuna).ended()[0] == 0
    search = ["-m", *quick, "seed=1", LR, "hydra/sweeper=optuna", "hydra.sweep.dir=other"]
    assert start(*search, before=hide_optuna).ended() == (
        1,
        "error: hydra/sweeper=optuna is not installed; type pip install 'vitmnist[search]'\n",
    )
    assert not (tmp_path / "other").exists()
