"""A search by Optuna: over the space of `conf/hparams/`, judged by held-out training images."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Train, result_of
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from vitmnist.config import CONF
from vitmnist.explain import explain
from vitmnist.sweep import objective

SEARCHES = sorted(file.stem for file in (REPOSITORY / "conf" / "hparams").glob("*.yaml"))


@pytest.fixture
def quick(tiny_root: Path) -> list[str]:
    """Overrides for two trials of a moment, judged by 5 of 23 images."""
    few = ["data/dataset=kmnist", f"data.root={tiny_root}", "data.holdout=5", "batch_size=6", "epochs=1", "model=cnn"]
    return [*few, "hydra.sweeper.n_trials=2", "hydra.sweep.dir=here"]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_in_the_best_of_its_trials(name: str, train: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train(f"hparams={name}", *quick, "sweep.target_acc=0.001")
    assert ended.returncode == 0, ended.stderr
    space = yaml.safe_load((REPOSITORY / "conf" / "hparams" / f"{name}.yaml").read_text())["hydra"]["sweeper"]
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[01]-*"))]
    assert len(results) == 2
    for result in results:
        assert (result["dataset"]["train_size"], result["dataset"]["test_size"]) == (18, 5)
    best = yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())
    assert set(best["best_params"]) == set(space["params"]) - {"batch_size", "epochs"}  # those were typed
    last = [result["epochs"][-1] for result in results]
    if name == "accuracy":
        assert best["best_value"] == max(epoch["val_acc"] for epoch in last)
    else:
        assert best["best_value"] == min(epoch["epoch_s"] if epoch["val_acc"] else math.inf for epoch in last)
    assert (tmp_path / "here" / "report.html").exists()


def test_trials_that_fail_do_not_end_the_search(train: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train("hparams=accuracy", *quick, "optimizer.lr=choice(1e30,0.01)", "hydra.sweeper.n_trials=4")
    assert ended.returncode == 1
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-3]-*"))]
    assert {result["status"] for result in results} == {"completed", "failed"}
    assert "of 4 jobs failed" in ended.stderr
    assert (
        yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())["best_params"]["optimizer.lr"]
        == 0.01
    )


def test_a_search_without_a_single_good_trial_says_so(train: Train, quick: list[str]) -> None:
    ended = train("hparams=accuracy", *quick, "optimizer.lr=choice(1e30,1e31)")
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "error: no trial of the search came to its end; the report in the sweep's folder says why\n"
    )


@pytest.mark.parametrize("key", ["repeats=2", "sweep.resume=here"])
def test_what_a_search_cannot_do_is_refused(key: str, train: Train, quick: list[str], tmp_path: Path) -> None:
    if key.startswith("sweep"):
        (tmp_path / "here").mkdir()
        typed = {"task": ["hparams=accuracy"], "hydra": []}
        (tmp_path / "here" / "multirun.yaml").write_text(json.dumps({"hydra": {"overrides": typed}}))
        ended = train(key)
    else:
        ended = train("hparams=accuracy", *quick, key)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {key.partition('=')[0]}: is for sweeps over listed values")


def test_the_plugin_that_is_missing_is_named() -> None:
    error = MissingConfigException("", missing_cfg_file="hydra/sweeper/optuna", options=["basic"])
    assert explain(error, CONF) == "hydra/sweeper=optuna: is not installed; type pip install 'vitmnist[search]'"


def test_what_a_job_tells_a_search() -> None:
    epochs = [{"epoch_s": 2.0, "val_acc": 90.0}, {"epoch_s": 3.0, "val_acc": 97.0}, {"epoch_s": 5.0, "val_acc": 96.0}]

    def told(name: str, target: float) -> float:
        return objective(OmegaConf.create({"sweep": {"objective": name, "target_acc": target}}), epochs)

    assert told("val_acc", 97.0) == 96.0
    assert told("seconds_to_target", 97.0) == 5.0
    assert told("seconds_to_target", 80.0) == 2.0
    assert told("seconds_to_target", 98.0) == math.inf
