"""A run folder of an earlier version stays usable; version 0.1 has written tests/records_of_0_1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.conftest import REPOSITORY, Printed, result_of
from tests.data.datasets.test_image_folder import folder
from vitmnist.checkpoint import storage
from vitmnist.cli.evaluate import main as evaluate_main
from vitmnist.cli.export import main as export_main
from vitmnist.cli.predict import main as predict_main
from vitmnist.cli.report import main as report_main
from vitmnist.cli.train import main as train_main
from vitmnist.config import earlier
from vitmnist.config.earlier import with_current_keys
from vitmnist.tracking.result import CONFIG
from vitmnist.tracking.runs import read_run

__all__ = ["folder"]  # a fixture

FOLDER = REPOSITORY / "tests" / "records_of_0_1"
EVALUATION = json.loads((FOLDER / "evaluation.json").read_text())  # what 0.1 printed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER, tmp_path / "run")


def test_a_run_of_0_1_is_evaluated_as_it_was_and_predicts_exports_is_reported_and_resumed(
    run: Path, tmp_path: Path, output_of: Printed
) -> None:
    for weights in ("final", "last"):
        printed = json.loads(output_of(evaluate_main, "run", "--json", "--predictions", f"--weights={weights}"))
        assert printed["accuracy"] == EVALUATION["accuracy"] == result_of(run)["epochs"][-1]["eval_acc"]
        assert [int(row["predicted_class"]) for row in printed["predictions"]] == EVALUATION["predicted"]
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    output_of(predict_main, "run", "black.png")
    output_of(export_main, "run", "--format", "torch", "--output", "model.pt2")
    assert "s per epoch (single run)" in output_of(report_main, "run")
    config = read_run(run).config
    assert config["data.loader.name"] == "gpu_slice"
    assert not [key for key in config if key.startswith("trainer.") and "graph" in key], "plain is plain"
    before = result_of(run)["epochs"]
    output_of(train_main, "resume=run", "epochs=5")
    now = result_of(run)["epochs"]
    assert (now[: len(before)], len(now)) == (before, 5)


def test_a_key_that_has_moved_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"a.old": "b.new", "gone.all": None, "top": "b.top"}
    monkeypatch.setattr(earlier, "CURRENT_KEYS", moved)
    monkeypatch.setattr(earlier, "ADDED_KEYS", {"c.added": 4, "top": 5, "b.top": 6})
    recorded = {"a": {"old": [1], "kept": {}}, "gone": {"all": 2}, "top": 3}
    expected = {"a": {"kept": {}}, "gone": {}, "b": {"new": [1], "top": 3}, "c": {"added": 4}, "top": 5}
    assert with_current_keys(recorded) == expected
    assert with_current_keys({"a": 5, "b": 1}) == {"a": 5, "b": 1, "c": {"added": 4}, "top": 5}
    assert with_current_keys({}) == {}


def test_a_hold_out_without_a_seed_was_drawn_by_that_of_the_run(
    quick: list[str], output_of: Printed, refuse: Printed, tmp_path: Path
) -> None:
    """A run goes on with that split; if its record has another, the checksums refuse it."""
    for holdout_seed in (7, 0):
        run = tmp_path / f"run{holdout_seed}"
        typed = ["seed=7", "data.holdout=0.3", f"data.holdout_seed={holdout_seed}", "epochs=1"]
        output_of(train_main, *quick, *typed, f"hydra.run.dir={run}")
        state, recorded = storage.load(run), yaml.safe_load((run / CONFIG).read_text())
        for config in (state["config"], recorded):
            del config["data"]["holdout_seed"]
        storage.save(run, {key: value for key, value in state.items() if key != "format"})
        (run / CONFIG).write_text(yaml.safe_dump(recorded))
    before = result_of(tmp_path / "run7")["dataset"]
    output_of(train_main, "resume=run7", "epochs=2")
    assert result_of(tmp_path / "run7")["dataset"] == before
    assert "the dataset has changed since the run began: train_images" in refuse("resume=run0", "epochs=2")


def test_a_record_without_the_options_that_a_member_has_now_is_that_of_their_defaults(
    folder: Path, output_of: Printed, tmp_path: Path
) -> None:
    data = ["data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={tmp_path / 'root'}", "model=cnn"]
    output_of(train_main, *data, "epochs=1", "hydra.run.dir=run")
    run = tmp_path / "run"
    state = storage.load(run)
    for config in (state["config"], recorded := yaml.safe_load((run / CONFIG).read_text())):
        del config["data"]["normalize"], config["data"]["dataset"]["resize"], config["data"]["dataset"]["labels"]
    state["model_info"] |= {"draft": True}
    del state["model_info"]["size"], state["model_info"]["dataset"]
    storage.save(run, {key: value for key, value in state.items() if key != "format"})
    (run / CONFIG).write_text(yaml.safe_dump(recorded))
    for program, *arguments in ((evaluate_main,), (evaluate_main, "--weights=last"), (predict_main, str(folder))):
        output_of(program, "run", *arguments)
    output_of(train_main, "resume=run", "epochs=2")
    assert len(result_of(run)["epochs"]) == 2
