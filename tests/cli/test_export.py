"""The export of a trained model, as its users start it."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import CallHere, Printed
from vitmnist.augment.preprocess import Preprocess
from vitmnist.cli.export import FORMATS, export_model, main
from vitmnist.data.datasets.base import Dataset
from vitmnist.inference.trained_model import TrainedModel, load_model
from vitmnist.models import MODELS


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def trained(tmp_path: Path, runs: Path) -> Path:
    """The folder of a completed run: a CNN and the 7 test images of the tiny `kmnist`."""
    return shutil.copytree(runs / "whole", tmp_path / "run")


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_needs_nothing_of_this_project_and_predicts_what_the_original_does(
    name: str, trained: Path, tiny: Dataset, output_of: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in FORMATS[name].packages:
        pytest.importorskip(package)
    before = content(trained)
    model, described, summary = output_of(main, "run", f"--format={name}", "data.dataset.test_size=3").splitlines()
    assert summary.startswith("kmnist, test split, 3 images: accuracy ")
    file, description = Path(model), json.loads(Path(described).read_text(encoding="utf-8"))
    new = {path: data for path, data in content(trained).items() if path not in before}
    assert content(trained) == before | new, "the records of the run are as they were"
    assert {*map(str, new)} == {file.name, f"{file.name}.json"}
    assert description["images"]["shape"] == [None, 1, 28, 28]
    assert description["classes"] == list(tiny.train.classes)
    load, original = FORMATS[name].load, load_model(trained, device="cpu")
    expected = original.module(Preprocess(tiny.train)(tiny.test.images))
    for module in [module for module in sys.modules if module.partition(".")[0] == "vitmnist"]:
        monkeypatch.setitem(sys.modules, module, None)  # an import of it raises
    predict = load(file.read_bytes())
    for size in (1, 2, 7):
        with torch.inference_mode():
            torch.testing.assert_close(predict(tiny.test.images[:size]), expected[:size], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --weights=best", "error: run: holds no best weights"),
        ("run --output=no/model.pt2", "error: no/model.pt2: "),
        ("run --output=other.pt2", "error: other.pt2: exists already; "),
        ("run --output=notes.pt2", "error: notes.pt2.json: exists already; "),
        ("run data.dataset.test_size=8", "data.dataset.test_size=8: the split has 7 images"),
        ("run --format=onnx", "error: onnx is not installed; run pip install 'vitmnist[export]'\n"),
        ("run", "error: the exported model and "),
    ],
)
def test_bad_input_and_other_predictions_are_one_message_and_change_nothing(
    call_here: CallHere, tmp_path: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.pt2").touch()
    (tmp_path / "notes.pt2.json").touch()
    monkeypatch.setitem(sys.modules, "onnx", None)
    if arguments == "run":
        right = FORMATS["torch"]
        wrong = replace(right, load=lambda exported: lambda images: -right.load(exported)(images))
        monkeypatch.setitem(FORMATS, "torch", wrong)
    before = content(tmp_path)
    ended = call_here(main, "--format=torch", *arguments.split())
    assert ended.returncode == 1
    assert ended.stderr.startswith(message) or message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "patch_size"),
    [
        ("torch", 7),
        pytest.param("onnx", 7, marks=pytest.mark.slow),
        pytest.param("onnx", 2, marks=pytest.mark.slow),  # so many tokens that attention is fused
    ],
)
def test_the_transformer_is_exported_for_any_batch_size(name: str, patch_size: int, tiny: Dataset) -> None:
    for package in FORMATS[name].packages:
        pytest.importorskip(package)
    options = {"name": "vit", "patch_size": patch_size, "dim": 16, "depth": 2, "heads": 2, "head_dim": 8, "mlp_dim": 16}
    model, split = MODELS.build(options, (1, 28, 28), 10).eval(), tiny.test
    run, preprocess = Path("run"), Preprocess(mean=split.mean, std=split.std)
    trained = TrainedModel(run, run, model, preprocess, split.classes, (1, 28, 28), {"name": "mnist"})
    _, summary = export_model(FORMATS[name], trained, tiny, batch_size=3)
    assert float(re.search(r"logits (\S+)$", summary)[1]) < 1e-4
