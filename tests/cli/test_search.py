"""A search by Optuna: over the space of `conf/hparams_search/`, judged by held-out training images."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
import yaml
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from tests.conftest import REPOSITORY, Start, Train, result_of
from vitmnist.cli.messages import describe
from vitmnist.cli.sweep import objective
from vitmnist.tracking.runs import Run

SEED = "hydra.sweeper.sampler.seed=42"  # with which both are tried
SEARCHES = sorted(file.stem for file in (REPOSITORY / "conf" / "hparams_search").glob("*.yaml"))


@pytest.fixture
def quick(quick: list[str]) -> list[str]:
    """Overrides for two short trials, evaluated on 5 of 23 images."""
    return [*quick, "data.holdout=5", "epochs=1", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=here"]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_in_the_best_of_its_trials(
    name: str, train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    ended = train_here(f"hparams_search={name}", *quick, "sweep.target_acc=0.001")
    assert ended.returncode == 0, ended.stderr
    space = yaml.safe_load((REPOSITORY / "conf" / "hparams_search" / f"{name}.yaml").read_text())["hydra"]["sweeper"]
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[01]-*"))]
    assert len(results) == 2
    for result in results:
        assert (result["dataset"]["train_size"], result["dataset"]["test_size"]) == (18, 5)
    best = yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())
    assert set(best["best_params"]) == set(space["params"]) - {"batch_size", "epochs"}  # those were typed
    last = [result["epochs"][-1] for result in results]
    if name == "accuracy":
        assert best["best_value"] == max(epoch["eval_acc"] for epoch in last)
    else:
        assert best["best_value"] == min(epoch["epoch_s"] if epoch["eval_acc"] else math.inf for epoch in last)
    assert (tmp_path / "here" / "report.html").exists()


def test_trials_that_fail_do_not_end_the_search(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here(
        "hparams_search=accuracy", *quick, "optimizer.lr=choice(1e30,0.01)", "hydra.sweeper.n_trials=4", SEED
    )
    assert ended.returncode == 1
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-3]-*"))]
    assert {result["status"] for result in results} == {"completed", "failed"}
    assert "of 4 jobs failed" in ended.stderr
    assert (
        yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())["best_params"]["optimizer.lr"]
        == 0.01
    )


def test_a_search_without_a_single_good_trial_says_so(train_here: Train, quick: list[str]) -> None:
    ended = train_here("hparams_search=accuracy", *quick, "optimizer.lr=choice(1e30,1e31)")
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: no trial of the search completed; the report in the sweep's folder says why\n")


def test_a_search_has_no_rounds(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here("hparams_search=accuracy", *quick, "repeats=2")
    assert ended.returncode == 1
    assert ended.stderr == "error: repeats: is for sweeps over listed values, not for a search\n"
    assert list(tmp_path.iterdir()) == []


def test_a_stored_search_ends_after_its_trials_in_all(
    train_here: Train, start: Start, quick: list[str], tmp_path: Path
) -> None:
    stored = ["hparams_search=accuracy", *quick[:-1], "hydra.sweeper.storage=sqlite:///study.db"]
    # Killed in its first trial, which does not count; until then, no other process can use the study.
    killed = start(*stored, "epochs=100000", "hydra.sweep.dir=killed").until("epoch 2/")
    ended = train_here(*stored, "hydra.sweep.dir=refused")
    assert (ended.returncode, "in use by another search" in ended.stderr) == (1, True)
    killed.kill_group()
    for place, n_trials in (("one", 1), ("two", 2)):
        ended = train_here(*stored, f"hydra.sweeper.n_trials={n_trials}", f"hydra.sweep.dir={place}")
        assert ended.returncode == 0, ended.stderr
        assert len(list((tmp_path / place).glob("*-*"))) == 1
    ended = train_here(*stored, "hydra.sweep.dir=three")
    assert (ended.returncode, ended.stdout[:28]) == (0, "all 2 trials of accuracy in ")
    assert not (tmp_path / "three").exists()
    trials = optuna.load_study("accuracy", f"sqlite:///{tmp_path}/study.db").get_trials()
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    tried = [result_of(next(tmp_path.glob(f"{place}/0-*")))["config"]["optimizer"]["lr"] for place in ("one", "two")]
    assert tried[0] != tried[1]
    best = [yaml.safe_load((tmp_path / place / "optimization_results.yaml").read_text()) for place in ("one", "two")]
    assert best[1]["best_value"] >= best[0]["best_value"]


def test_the_plugin_that_is_missing_is_named() -> None:
    error = MissingConfigException("", missing_cfg_file="hydra/sweeper/optuna", options=["basic"])
    assert describe(error).message == "hydra/sweeper=optuna is not installed; type pip install 'vitmnist[search]'"


def test_what_a_job_tells_a_search() -> None:
    epochs = [
        {"epoch_s": 2.0, "eval_acc": 90.0},
        {"epoch_s": 3.0, "eval_acc": 97.0},
        {"epoch_s": 5.0, "eval_acc": 96.0},
    ]
    ended = Run(Path(), "completed", "", {}, {"epochs": epochs})

    def told(name: str, target: float) -> float:
        return objective(OmegaConf.create({"sweep": {"objective": name, "target_acc": target}}), ended)

    assert told("eval_acc", 97.0) == 96.0
    assert told("seconds_to_target", 97.0) == 5.0
    assert told("seconds_to_target", 80.0) == 2.0
    assert told("seconds_to_target", 98.0) == math.inf
