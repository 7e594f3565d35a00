"""A search by Optuna: over the space of `conf/hparams_search/`, judged by held-out training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hydra.errors import MissingConfigException

from tests.conftest import REPOSITORY, Printed, Start, result_of
from vitmnist.cli.messages import describe

SEED = "hydra.sweeper.sampler.seed=42"  # with which both are tried


@pytest.fixture
def quick(quick: list[str]) -> list[str]:
    """Overrides for two short trials, evaluated on 5 of 23 images."""
    return [*quick, "data.holdout=5", "epochs=1", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=here"]


def best_of(sweep: Path) -> dict[str, Any]:
    """The parameters and the value of the best trial."""
    return yaml.safe_load((sweep / "optimization_results.yaml").read_text())


def test_a_search_ends_in_the_best_of_its_trials(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    succeed("hparams_search=accuracy", *quick)
    space = yaml.safe_load((REPOSITORY / "conf" / "hparams_search" / "accuracy.yaml").read_text())["hydra"]["sweeper"]
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[01]-*"))]
    assert [(one["dataset"]["train_size"], one["dataset"]["test_size"]) for one in results] == [(18, 5)] * 2
    best = best_of(tmp_path / "here")
    assert set(best["best_params"]) == set(space["params"])
    assert best["best_value"] == max(result["epochs"][-1]["eval_acc"] for result in results)
    assert (tmp_path / "here" / "report.html").exists()


def test_trials_that_fail_do_not_end_the_search(refuse: Printed, quick: list[str], tmp_path: Path) -> None:
    tried = ["optimizer.lr=choice(1e30,0.01)", "hydra.sweeper.n_trials=4", SEED]
    assert "of 4 jobs failed" in refuse("hparams_search=accuracy", *quick, *tried)
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-3]-*"))]
    assert {result["status"] for result in results} == {"completed", "failed"}
    assert best_of(tmp_path / "here")["best_params"]["optimizer.lr"] == 0.01


def test_a_search_without_a_single_good_trial_says_so(refuse: Printed, quick: list[str]) -> None:
    printed = refuse("hparams_search=accuracy", *quick, "optimizer.lr=choice(1e30,1e31)", "hydra.sweeper.n_trials=1")
    assert "error: ValueError: No trials are completed yet. (HYDRA_FULL_ERROR=1 shows the traceback)\n" in printed


@pytest.mark.slow
def test_a_stored_search_ends_after_its_trials_in_all(
    succeed: Printed, refuse: Printed, start: Start, quick: list[str], tmp_path: Path
) -> None:
    stored = ["hparams_search=accuracy", *quick[:-1], "hydra.sweeper.storage=sqlite:///study.db"]
    # Killed in its first trial, which does not count. Until then, no other process can use the study.
    killed = start(*stored, "epochs=100000", "hydra.sweep.dir=killed").until("epoch 2/")
    assert "in use by another search" in refuse(*stored, "hydra.sweep.dir=refused")
    killed.kill_group()
    places = [tmp_path / "one", tmp_path / "two"]
    for n_trials, place in enumerate(places, 1):
        succeed(*stored, f"hydra.sweeper.n_trials={n_trials}", f"hydra.sweep.dir={place.name}")
        assert len(list(place.glob("*-*"))) == 1
    assert succeed(*stored, "hydra.sweep.dir=three").startswith("all 2 trials of accuracy in ")
    assert not (tmp_path / "three").exists()
    trials = optuna.load_study("accuracy", f"sqlite:///{tmp_path}/study.db").get_trials()
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    tried = [result_of(next(place.glob("0-*")))["config"]["optimizer"]["lr"] for place in places]
    assert tried[0] != tried[1]
    assert best_of(places[1])["best_value"] >= best_of(places[0])["best_value"]


@pytest.mark.parametrize(
    ("plugin", "extra"),
    [("sweeper/optuna", "search"), ("launcher/submitit_slurm", "launchers")],
)
def test_the_plugin_that_is_missing_is_named(plugin: str, extra: str) -> None:
    group, _, name = plugin.partition("/")
    error = MissingConfigException("", missing_cfg_file=f"hydra/{plugin}", options=["basic"])
    assert describe(error).message == f"hydra/{group}={name} is not installed; type pip install 'vitmnist[{extra}]'"
