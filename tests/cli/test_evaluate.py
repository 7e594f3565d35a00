"""What was trained can be used: evaluated, and asked about pictures."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import REPOSITORY, result_of
from vitmnist.checkpoint import storage as checkpoint
from vitmnist.checkpoint.inference import load_inference_model
from vitmnist.cli.evaluate import evaluate, figures, main
from vitmnist.cli.predict import predict
from vitmnist.data.image_io import find_pictures
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.device import choose_device

CPU = torch.device("cpu")


def run(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def inference_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above `run`: MNIST, two epochs of 2,000 images."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = ["data.dataset.train_size=2000", "data.dataset.test_size=300", f"data.root={folder / 'data'}"]
    settings = ["model=cnn", "batch_size=20", "epochs=2", "hydra.run.dir=run"]
    program = [sys.executable, str(REPOSITORY / "train.py"), *sizes, *settings]
    subprocess.run(program, cwd=folder, check=True, timeout=200, capture_output=True)
    return folder


def test_evaluation_finds_what_the_run_recorded(inference_model: Path) -> None:
    ended = run("vitmnist.evaluate", "run", "--json", folder=inference_model)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["accuracy"] == result_of(inference_model / "run")["epochs"][-1]["eval_acc"]
    assert found["images"] == 300
    assert sum(map(sum, found["confusion_matrix"])) == 300
    assert [row["class"] for row in found["classes"]] == list("0123456789")
    shown = run("vitmnist.evaluate", "run", "data.dataset.test_size=100", folder=inference_model).stdout
    assert "of 100 images" in shown
    assert "confusion matrix" in shown


def test_figures_are_those_of_the_definition() -> None:
    found = figures(torch.tensor([[3, 1, 0], [0, 2, 0], [0, 0, 0]]), ("a", "b", "c"))
    assert found["accuracy"] == pytest.approx(100 * 5 / 6)
    first, second, absent = found["classes"]
    assert (first["precision"], first["recall"], first["images"]) == (100.0, 75.0, 4)
    assert second["precision"] == pytest.approx(100 * 2 / 3)
    assert second["f1"] == pytest.approx(80.0)
    assert (absent["precision"], absent["recall"], absent["f1"]) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: holds no run"),
        (["run", "--weights", "best", "data/dataset=kmnst"], "did you mean 'kmnist'?"),
        (["run", "data.dataset.test_size=10001"], "the set has 10000 images"),
        (["run", "batch_size=0"], "batch_size=0: must be at least 1"),
    ],
)
def test_mistakes_in_evaluating_are_named(inference_model: Path, arguments: list[str], message: str) -> None:
    ended = run("vitmnist.evaluate", *arguments, folder=inference_model)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_pictures_of_any_size_and_mode_are_classified(inference_model: Path) -> None:
    from vitmnist import load_dataset

    test = load_dataset("mnist", root=str(inference_model / "data"), test_size=300).test
    paths = []
    for index in range(20):
        picture = Image.fromarray(test.images[index, 0].numpy())
        picture = picture.resize((28 + 28 * (index % 3),) * 2).convert(("L", "RGB", "RGBA", "I;16")[index % 4])
        if index % 4 == 3:
            picture = Image.fromarray(test.images[index, 0].numpy().astype("uint16") * 257)
        paths.append(inference_model / f"{index}.png")
        picture.save(paths[-1])
    found = list(predict(load_inference_model(inference_model / "run", CPU), paths, CPU))
    right = sum(int(row["class"]) == int(label) for row, label in zip(found, test.labels[:20].tolist(), strict=True))
    assert right >= 15
    assert all(sum(row["all"].values()) == pytest.approx(1) for row in found)
    assert all(row["probability"] == max(row["all"].values()) for row in found)
    inverted = inference_model / "inverted.png"
    Image.fromarray(255 - test.images[0, 0].numpy()).save(inverted)
    (again,) = predict(load_inference_model(inference_model / "run", CPU), [inverted], CPU, invert=True)
    assert again["all"] == pytest.approx(found[0]["all"], abs=1e-5)
    shown = run("vitmnist.predict", "run", "0.png", "1.png", folder=inference_model)
    assert [line.partition(":")[0] for line in shown.stdout.splitlines()] == ["0.png", "1.png"]
    as_json = run("vitmnist.predict", "run", "--json", "0.png", folder=inference_model)
    assert json.loads(as_json.stdout)[0]["class"] == found[0]["class"]
    refused = run("vitmnist.predict", "run", "0.png", "nothing.png", folder=inference_model)
    assert refused.returncode == 1
    assert "error: nothing.png: cannot be read as a picture" in refused.stderr


def test_predict_takes_folders_and_patterns(
    inference_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.png", "b/1.png", "b/deep/3.PNG", "[odd].png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9)).save(tmp_path / name)
    Path("b/notes.txt").write_text("no picture")
    Path("none").mkdir()
    folder = ["b/1.png", "b/2.png", "b/deep/3.PNG"]
    for names, expected in (
        (["b"], folder),
        (["b/[12].png"], folder[:2]),
        (["**/*.png"], ["[odd].png", *folder[:2]]),
        (["b/2.png", "b", "?"], [folder[1], folder[0], folder[2]]),
        (["[odd].png", "absent.png"], ["[odd].png", "absent.png"]),
    ):
        assert list(map(str, find_pictures(names))) == expected
    with pytest.raises(DataError, match=r"none: holds no picture \(\.jpg"):
        find_pictures(["b", "none"])
    with pytest.raises(DataError, match=r"x\*: matches no file"):
        find_pictures(["x*"])
    monkeypatch.setattr("vitmnist.cli.predict.BATCH_SIZE", 2)
    rows = predict(load_inference_model(inference_model / "run", CPU), find_pictures(["b"]), CPU)
    assert [row["file"] for row in rows] == folder


def test_every_mistake_is_listed_and_the_worst_are_drawn(
    inference_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mistakes", "mistakes.csv", "--grid", "mistakes.png", "--json", "--predictions"]
    monkeypatch.chdir(inference_model)
    monkeypatch.setattr(sys, "argv", ["evaluate", "run", *options])
    main()
    found = json.loads(capsys.readouterr().out)
    rows = found["predictions"]
    assert [row["image"] for row in rows] == list(range(300))
    assert found["split"] == "test"
    wrong = [row for row in rows if row["true_class"] != row["predicted_class"]]
    assert len(wrong) == round(300 * (1 - found["accuracy"] / 100))
    listed = list(csv.DictReader((inference_model / "mistakes.csv").open()))
    assert [int(row["image"]) for row in listed] == [
        row["image"] for row in sorted(wrong, key=lambda row: -row["probability"])
    ]
    for row in listed:
        known = rows[int(row["image"])]
        assert torch.tensor(float(row["probability"])) == torch.tensor(known["probability"])
        assert (row["true_class"], row["predicted_class"]) == (known["true_class"], known["predicted_class"])
    with Image.open(inference_model / "mistakes.png") as grid:
        assert grid.format == "PNG"


def test_evaluation_is_on_the_split_of_the_training(inference_model: Path) -> None:
    held_out = evaluate(inference_model / "run", ["data.holdout=50"], None)
    assert held_out.dataset.evaluated_on() == "held-out split, 50 images"
    test = evaluate(inference_model / "run", [], None)
    assert test.dataset.evaluated_on() == "test split, 300 images"
    assert torch.equal(held_out.split.images, test.dataset.train.images[-50:])


def test_mistakes_that_cannot_be_written_are_an_error(inference_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inference_model)
    monkeypatch.setattr(sys, "argv", ["evaluate", "run", "--mistakes", "nowhere/mistakes.csv"])
    with pytest.raises(SystemExit, match=r"error: cannot write nowhere/mistakes\.csv: No such file or directory"):
        main()


def test_weights_are_chosen_by_name_and_verified(inference_model: Path, tmp_path: Path) -> None:
    shutil.copytree(inference_model / "run", tmp_path / "run")
    place = tmp_path / "run" / "checkpoints"
    assert not (place / "best.pt").exists(), "selected by the test split"
    checkpoint.save(tmp_path / "run", checkpoint.load(tmp_path / "run"), best=True)
    for name in ("final", "best", "last"):
        assert load_inference_model(tmp_path / "run", CPU, name).path.stem == name
    (place / "best.pt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"best\.pt: is damaged"):
        load_inference_model(tmp_path / "run", CPU, "best")
    weights = load_file(place / "final.safetensors")
    save_file(weights, place / "final.safetensors")
    with pytest.raises(DataError, match="not of this program"):
        load_inference_model(tmp_path / "run", CPU)
    (place / "final.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"final\.safetensors: is damaged"):
        load_inference_model(tmp_path / "run", CPU)
    (place / "final.safetensors").unlink()
    (place / "best.pt").unlink()
    assert load_inference_model(tmp_path / "run", CPU).path.stem == "last"
    with pytest.raises(ConfigError, match="holds no final weights"):
        load_inference_model(tmp_path / "run", CPU, "final")


def test_a_data_set_that_the_model_does_not_know_is_refused(inference_model: Path, tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / "pictures" / "only" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9)).save(path)
    changed = ["data/dataset=image_folder", f"data.dataset.path={tmp_path / 'pictures'}", f"data.root={tmp_path}"]
    with pytest.raises(ConfigError, match=r"images \[1, 28, 28\] of 10 classes, the data set has .* of 1"):
        evaluate(inference_model / "run", changed, None)
    assert choose_device("cpu") == CPU
