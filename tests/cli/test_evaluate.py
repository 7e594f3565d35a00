"""`evaluate` finds what the run recorded, and lists every mistake of the model."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import CallHere, Printed, result_of
from vitmnist.cli.evaluate import describe_evaluation
from vitmnist.config.schema import DataConfig
from vitmnist.data.datasets.base import Dataset
from vitmnist.metrics import METRICS

KEYS = "data.root, data.dataset, data.holdout, data.holdout_seed, data.folds, data.fold, batch_size, metrics"
NO_EFFECT = f"has no effect on a trained model; only {KEYS} can be changed"


def test_evaluation_finds_the_accuracy_that_the_run_recorded(trained: Path, output_of: Printed) -> None:
    printed = json.loads(output_of("evaluate", "run", "--json", folder=trained))
    recorded = result_of(trained / "run")["epochs"][-1]
    assert {name: printed[name] for name in METRICS.members()} == {n: recorded[f"eval_{n}"] for n in METRICS.members()}
    assert printed["images"] == sum(map(sum, printed["confusion_matrix"])) == 300
    assert [row["class"] for row in printed["classes"]] == list("0123456789")
    table = output_of("evaluate", "run", "data.dataset.test_size=100", folder=trained)
    assert "\n100 images\nacc " in table
    assert "confusion matrix" in table


def test_class_metrics_follow_their_definition() -> None:
    metrics = describe_evaluation(torch.tensor([[3, 1, 0], [0, 2, 0], [0, 0, 0]]), ("a", "b", "c"), {"acc": 83.3})
    first, second, absent = metrics["classes"]
    assert (first["precision"], first["recall"], first["images"]) == (100.0, 75.0, 4)
    assert (second["precision"], second["f1"]) == pytest.approx((100 * 2 / 3, 80.0))
    assert (absent["precision"], absent["recall"], absent["f1"]) == (None, None, None)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("evaluate", ["run", "model=vit"], f"error: model=vit: {NO_EFFECT}"),
        ("evaluate", ["run", "data.normalize=imagenet"], f"error: data.normalize=imagenet: {NO_EFFECT}"),
        ("export", ["run", "--format=torch", "data/loader=disk"], f"error: data/loader=disk: {NO_EFFECT}"),
        ("evaluate", ["run", "data/dataset=kmnst"], "did you mean 'kmnist'?"),
        ("evaluate", ["run", "batch_size=0"], "batch_size=0: must be at least 1"),
        ("evaluate", ["run", "--mistakes", "no/a.csv"], "error: no/a.csv: No such file or directory"),
        ("predict", ["run", "nothing.png"], "error: nothing.png: cannot be read as an image"),
    ],
)
def test_errors_are_one_message(
    trained: Path, call_here: CallHere, program: Callable[[], None], arguments: list[str], message: str
) -> None:
    ended = call_here(program, *arguments, folder=trained)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_mistake_is_listed_and_the_worst_are_drawn(trained: Path, call_here: CallHere) -> None:
    options = ["--mistakes", "mistakes.csv", "--grid", "mistakes.png", "--json", "--predictions"]
    printed = json.loads(call_here("evaluate", "run", *options, folder=trained).stdout)
    rows = printed["predictions"]
    assert [row["image"] for row in rows] == list(range(300))
    assert printed["split"] == "test"
    wrong = [row for row in rows if row["true_class"] != row["predicted_class"]]
    assert len(wrong) == round(300 * (1 - printed["acc"] / 100))
    wrong.sort(key=lambda row: -row["probability"])
    lines = (trained / "mistakes.csv").read_text().splitlines()
    assert all(isinstance(row["probability"], float) for row in csv.DictReader(lines, quoting=csv.QUOTE_NONNUMERIC))
    listed = list(csv.DictReader(lines))
    assert [list(row.values())[:3] for row in listed] == [list(map(str, row.values()))[:3] for row in wrong]
    assert torch.equal(*(torch.tensor([float(row["probability"]) for row in table]) for table in (listed, wrong)))
    assert (trained / "mistakes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("program", "options"), [("evaluate", []), ("export", ["--format=torch"])])
def test_a_split_without_images_is_one_message(
    trained: Path, call_here: CallHere, monkeypatch: pytest.MonkeyPatch, program: Callable[[], None], options: list[str]
) -> None:
    def without_test_images(dataset: Dataset, data: DataConfig) -> Dataset:
        return replace(dataset, test=dataset.train.subset(slice(0)))

    monkeypatch.setattr("vitmnist.inference.evaluation.hold_out_and_normalize", without_test_images)
    ended = call_here(program, "run", *options, folder=trained)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "error: the split to evaluate has no images")
    assert "Traceback" not in ended.stderr
