"""The export of a trained model, as its users start it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.conftest import CallHere, result_of
from tests.support.pages import blocks
from vitmnist.checkpoint.inference import InferenceModel, load_inference_model
from vitmnist.cli.export import export, main
from vitmnist.data.datasets import Dataset
from vitmnist.data.preprocess import Preprocess
from vitmnist.export.card import model_card
from vitmnist.export.exported import Exported, export_model
from vitmnist.export.formats import FORMATS
from vitmnist.models import MODELS

WEIGHTS = Path("checkpoints") / "final.safetensors"


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Path:
    """The folder of a completed run: a CNN and the 7 test images of the tiny `kmnist`."""
    return shutil.copytree(runs / "whole", tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module", params=FORMATS)
def exported(request: pytest.FixtureRequest, trained: Path) -> Path:
    """The exported model of the run, in the run's folder."""
    kind = FORMATS[request.param]
    for package in kind.packages:
        pytest.importorskip(package)
    before, output = content(trained), trained / f"model{kind.suffix}"
    export(trained, kind, output, [], None)
    new = {path: data for path, data in content(trained).items() if path not in before}
    assert content(trained) == before | new, "the records of the run are as they were"
    assert {*map(str, new)} == {output.name, f"{output.name}.md"}
    return output


def test_the_exported_model_takes_raw_images_in_batches_of_any_size(
    exported: Path, trained: Path, tiny: Dataset
) -> None:
    original = load_inference_model(trained, torch.device("cpu"))
    (kind,) = (kind for kind in FORMATS.values() if kind.suffix == exported.suffix)
    predict = kind.load(exported.read_bytes())
    for size in (1, 2, 7):
        images = tiny.test.images[:size]
        with torch.inference_mode():
            expected, logits = original.model(Preprocess(tiny.train)(images)), predict(images)
        assert logits.shape == (size, 10)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_model_card_says_what_the_model_is_and_its_usage_needs_nothing_of_this_project(
    exported: Path, trained: Path, tiny: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Path(f"{exported}.md")
    text, result = card.read_text(), result_of(trained)
    (classes,), (recipe,), (usage,) = (blocks(language, card) for language in ("json", "bash", "python"))
    assert json.loads(classes) == list(tiny.train.classes)
    assert recipe.startswith("python train.py data/dataset=kmnist ")
    assert "hydra." not in recipe
    for file in (exported, trained / WEIGHTS):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in text
    assert result["dataset"]["sha256"]["test_images"] in text
    assert f"| accuracy | {result['epochs'][-1]['eval_acc']:.2f}% on kmnist, test split, 7 images" in text
    assert "uint8 `[B, 1, 28, 28]`" in text
    assert "transparent pixels on white, converted to grey, resized to 28×28 by a bilinear filter" in text
    assert len(text.splitlines()) <= 41
    for module in [name for name in sys.modules if name.partition(".")[0] == "vitmnist"]:
        monkeypatch.setitem(sys.modules, module, None)  # an import of it raises
    monkeypatch.chdir(exported.parent)
    exec(usage, {})
    assert re.fullmatch(r"(tensor\()?\[\d\]\)?\n", capsys.readouterr().out)


@pytest.mark.parametrize("draft", [False, True])
def test_the_card_says_how_jpegs_are_decoded(trained: Path, tiny: Dataset, draft: bool) -> None:
    model = replace(load_inference_model(trained, torch.device("cpu")), draft=draft)
    card = model_card(Exported(FORMATS["torch"], b"", model, tiny, 0.0, 0.0), "model.pt2", [])
    assert ("| image files | JPEG decoded at the smallest of the scales" in card) == draft


def test_the_command_checks_the_model_on_the_data_that_is_named(
    trained: Path, call_here: CallHere, tmp_path: Path
) -> None:
    ended = call_here(main, str(trained), "--format=torch", "--output=digits.pt2", "data.dataset.test_size=3")
    assert ended.returncode == 0, ended.stderr
    model, card, summary = ended.stdout.splitlines()
    assert (model, card) == ("digits.pt2", "digits.pt2.md")
    assert summary.startswith("kmnist, test split, 3 images: accuracy ")
    assert {path.name for path in tmp_path.iterdir()} == {model, card}


def test_an_export_that_predicts_other_classes_leaves_the_earlier_one(
    trained: Path, call_here: CallHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pt2").write_text("earlier")
    (tmp_path / "model.pt2.md").write_text(f"# Model card: model.pt2\n{hashlib.sha256(b'earlier').hexdigest()}\n")
    before = content(tmp_path)
    right = FORMATS["torch"]
    wrong = replace(right, load=lambda exported: lambda images: -right.load(exported)(images))
    monkeypatch.setitem(FORMATS, "torch", wrong)
    ended = call_here(main, str(trained), "--format=torch", "--output=model.pt2")
    assert ended.returncode == 1
    assert re.match(r"error: the exported model predicts another class than .* for \d images of kmnist", ended.stderr)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "error: nowhere: holds no run"),
        ("run --format=tflite", "invalid choice: 'tflite' (choose from"),
        ("run --weights=best", "error: run: holds no best weights"),
        ("run --output=run/checkpoints/last.pt", "must end in .pt2"),
        ("run --output=no/model.pt2", "cannot write no/model.pt2: no does not exist, or is not"),
        ("run --output=run/result.json/a.pt2", "cannot write run/result.json/a.pt2: run/result"),
        ("run --output=/proc/model.pt2", "error: /proc/model.pt2: "),
        ("run --output=other.pt2", "error: other.pt2: not overwritten, because it is not an"),
        ("run --output=notes.pt2", "error: notes.pt2: not overwritten, because it is not an"),
        ("run data.dataset.test_size=8", "data.dataset.test_size=8: the set has 7 images"),
        ("weightless", "error: weightless: holds no final, best or last weights"),
        ("unknown", "not of this version of the program: model.name=resnet: not known"),
        ("changed", "changed/model.pt2: not overwritten, because it is not an unchanged export"),
        ("nan", "or not of this version of the program: some weights are not finite"),
        ("misfit", "not of this version of the program: Error(s) in loading state_dict for CNN"),
    ],
)
def test_bad_input_is_one_message_and_changes_nothing(
    trained: Path, call_here: CallHere, tmp_path: Path, arguments: str, message: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "other.pt2").write_text("of another program")
    (tmp_path / "notes.pt2.md").write_text("# Notes\n")
    folder, *options = arguments.split()
    if folder not in ("run", "nowhere"):
        damage(shutil.copytree(trained, tmp_path / folder))
    before = content(tmp_path)
    ended = call_here(main, folder, "--format=torch", *options)
    assert ended.returncode in (1, 2)
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert content(tmp_path) == before


def damage(run: Path) -> None:
    """Change the weights of a copied run as its name says."""
    with safe_open(run / WEIGHTS, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if run.name == "weightless":
        shutil.rmtree(run / "checkpoints")
    elif run.name == "unknown":
        save_file(tensors, run / WEIGHTS, {"vitmnist": metadata["vitmnist"].replace('"cnn"', '"resnet"')})
    elif run.name == "changed":
        (run / "model.pt2").write_bytes(b"changed")
        (run / "model.pt2.md").write_text(f"# Model card: model.pt2\n{hashlib.sha256(b'export').hexdigest()}\n")
    elif run.name == "nan":
        save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, run / WEIGHTS, metadata)
    else:
        save_file({f"old.{name}": tensor for name, tensor in tensors.items()}, run / WEIGHTS, metadata)


def test_a_missing_package_is_named_with_its_extra(
    trained: Path, call_here: CallHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    ended = call_here(main, str(trained), "--format=onnx")
    assert ended.returncode == 1
    assert ended.stderr == "error: onnx is not installed; type pip install 'vitmnist[export]'\n"


@pytest.mark.parametrize(
    ("format_name", "patch_size"),
    [
        ("torch", 7),
        pytest.param("onnx", 7, marks=pytest.mark.slow),
        pytest.param("onnx", 2, marks=pytest.mark.slow),  # so many tokens that attention is fused
    ],
)
def test_the_transformer_is_exported_for_any_batch_size(format_name: str, patch_size: int, tiny: Dataset) -> None:
    kind = FORMATS[format_name]
    for package in kind.packages:
        pytest.importorskip(package)
    options = {"name": "vit", "patch_size": patch_size, "dim": 16, "depth": 2, "heads": 2, "head_dim": 8, "mlp_dim": 16}
    model = MODELS.build(options, (1, 28, 28), 10).eval()
    split = tiny.test
    trained = InferenceModel(model, Path("final.safetensors"), (1, 28, 28), split.classes, split.mean, split.std)
    assert export_model(kind, trained, tiny, batch_size=3).largest_difference < 1e-4
