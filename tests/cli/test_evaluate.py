"""`evaluate` and `predict` use a trained model."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from PIL import Image

from tests.conftest import CallHere, Printed, result_of
from tests.support.pictures import write_pictures
from tests.support.processes import TrainProcess
from vitmnist import load_dataset
from vitmnist.checkpoint import storage
from vitmnist.cli.evaluate import describe_evaluation
from vitmnist.cli.evaluate import main as evaluate_main
from vitmnist.cli.export import main as export_main
from vitmnist.cli.predict import main as predict_main
from vitmnist.cli.predict import predict
from vitmnist.config.compose import compose
from vitmnist.config.schema import DataConfig
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.image_listing import find_images
from vitmnist.errors import ConfigError, DataError
from vitmnist.inference.trained_model import load_model
from vitmnist.metrics import METRICS
from vitmnist.tracking.result import CONFIG_FILE

KEYS = "data.root, data.dataset, data.holdout, data.holdout_seed, data.folds, data.fold, batch_size"
NO_EFFECT = f"has no effect on a trained model; only {KEYS} can be changed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `run`: MNIST, two epochs of 2,000 images."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = ["data.dataset.train_size=2000", "data.dataset.test_size=300", f"data.root={folder / 'data'}"]
    settings = ["model=cnn", "batch_size=20", "epochs=2", "hydra.run.dir=run"]
    code, output = TrainProcess(folder, *sizes, *settings).ended()
    assert code == 0, output
    return folder


def test_evaluation_finds_the_accuracy_that_the_run_recorded(trained: Path, output_of: Printed) -> None:
    printed = json.loads(output_of(evaluate_main, "run", "--json", folder=trained))
    recorded = result_of(trained / "run")["epochs"][-1]
    assert {name: printed[name] for name in METRICS.members()} == {n: recorded[f"eval_{n}"] for n in METRICS.members()}
    assert printed["images"] == sum(map(sum, printed["confusion_matrix"])) == 300
    assert [row["class"] for row in printed["classes"]] == list("0123456789")
    table = output_of(evaluate_main, "run", "data.dataset.test_size=100", folder=trained)
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
        (evaluate_main, ["run", "model=vit"], f"error: model=vit: {NO_EFFECT}"),
        (evaluate_main, ["run", "data.normalize=imagenet"], f"error: data.normalize=imagenet: {NO_EFFECT}"),
        (export_main, ["run", "--format=torch", "data/loader=disk"], f"error: data/loader=disk: {NO_EFFECT}"),
        (evaluate_main, ["run", "data/dataset=kmnst"], "did you mean 'kmnist'?"),
        (evaluate_main, ["run", "batch_size=0"], "batch_size=0: must be at least 1"),
        (evaluate_main, ["run", "--mistakes", "no/a.csv"], "error: no/a.csv: No such file or directory"),
        (predict_main, ["run", "nothing.png"], "error: nothing.png: cannot be read as an image"),
    ],
)
def test_errors_are_one_message(
    trained: Path, call_here: CallHere, program: Callable[[], None], arguments: list[str], message: str
) -> None:
    ended = call_here(program, *arguments, folder=trained)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_images_of_any_size_and_mode_are_classified(trained: Path, call_here: CallHere) -> None:
    model = load_model(trained / "run", device="cpu")
    test = load_dataset("mnist", root=str(trained / "data"), test_size=300).test
    paths = [trained / f"{index}.png" for index in range(20)]
    for index, path in enumerate(paths):
        pixels, mode = test.images[index, 0].numpy(), ("L", "RGB", "RGBA", "I;16")[index % 4]
        image = Image.fromarray(pixels.astype("uint16") * 257 if mode == "I;16" else pixels)
        (image if mode == "I;16" else image.resize((28 + 28 * (index % 3),) * 2).convert(mode)).save(path)
    rows = list(predict(model, paths))
    correct = [int(row["class"]) == label for row, label in zip(rows, test.labels[:20].tolist(), strict=True)]
    assert sum(correct) >= 15
    assert all(sum(row["all"].values()) == pytest.approx(1) for row in rows)
    assert all(row["probability"] == row["all"][row["class"]] == max(row["all"].values()) for row in rows)
    Image.fromarray(255 - test.images[0, 0].numpy()).save(trained / "inverted.png")
    (inverted,) = predict(model, [trained / "inverted.png"], invert=True)
    assert inverted["all"] == pytest.approx(rows[0]["all"], abs=1e-5)
    printed = call_here(predict_main, "run", "0.png", "1.png", folder=trained).stdout
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["0.png", "1.png"]
    as_json = call_here(predict_main, "run", "--json", "0.png", folder=trained).stdout
    assert json.loads(as_json)[0]["class"] == rows[0]["class"]


def test_a_file_that_is_no_picture_does_not_stop_the_others(trained: Path, call_here: CallHere) -> None:
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(trained / "black.png")
    (trained / "Thumbs.db").write_bytes(b"no image")
    Image.fromarray(np.full((20, 20), np.nan, np.float32)).save(trained / "nan.tif")
    ended = call_here(predict_main, "run", "Thumbs.db", "nan.tif", "black.png", folder=trained)
    assert ended.returncode == 1
    assert ended.stdout.startswith("black.png: ")
    assert "error: Thumbs.db: cannot be read as an image" in ended.stderr
    assert "nan.tif: cannot be read as an image: some of its pixels are not finite" in ended.stderr
    rows = json.loads(call_here(predict_main, "run", "--json", "Thumbs.db", "black.png", folder=trained).stdout)
    assert [sorted(row) for row in rows] == [["error", "file"], ["all", "class", "file", "probability"]]
    table = call_here(predict_main, "run", "--csv", "Thumbs.db", "black.png", folder=trained)
    damaged, black = csv.DictReader(table.stdout.splitlines())
    assert (table.returncode, damaged.pop("file"), set(damaged.values())) == (1, "Thumbs.db", {""})
    assert (black["file"], black["class"], float(black["probability"])) == tuple(
        rows[1][key] for key in ("file", "class", "probability")
    )
    assert {name: float(black[f"probability_{name}"]) for name in rows[1]["all"]} == rows[1]["all"]


def test_predict_takes_folders_and_patterns(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.png", "b/1.png", "b/deep/3.PNG", "[odd].png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9)).save(name)
    Path("b/notes.txt").write_text("not an image", encoding="utf-8")
    Path("none").mkdir()
    folder = ["b/1.png", "b/2.png", "b/deep/3.PNG"]
    for names, expected in (
        (["b"], folder),
        (["b/[12].png"], folder[:2]),
        (["**/*.png"], ["[odd].png", *folder[:2]]),
        (["b/2.png", "b", "?"], [folder[1], folder[0], folder[2]]),
        (["[odd].png", "absent.png"], ["[odd].png", "absent.png"]),
    ):
        assert list(map(str, find_images(names))) == expected
    with pytest.raises(DataError, match=r"none: holds no image \(\.jpg"):
        find_images(["b", "none"])
    with pytest.raises(DataError, match=r"x\*: matches no file"):
        find_images(["x*"])
    monkeypatch.setattr("vitmnist.cli.predict.BATCH_SIZE", 2)
    rows = predict(load_model(trained / "run", device="cpu"), find_images(["b"]))
    assert [row["file"] for row in rows] == folder


def test_every_mistake_is_listed_and_the_worst_are_drawn(trained: Path, call_here: CallHere) -> None:
    options = ["--mistakes", "mistakes.csv", "--grid", "mistakes.png", "--json", "--predictions"]
    printed = json.loads(call_here(evaluate_main, "run", *options, folder=trained).stdout)
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


def test_evaluation_uses_the_split_of_the_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = load_model(trained / "run").evaluate(overrides=["data.holdout=50"])
    assert "warning: the run divided its images differently" in capsys.readouterr().err
    assert (held_out.split_name, len(held_out.split)) == ("validation", 50)
    test = load_model(trained / "run").evaluate()
    assert (test.split_name, len(test.split), capsys.readouterr().err) == ("test", 300, "")
    assert len(load_model(trained / "run").evaluate("test", ["data.holdout=50"]).split) == 300
    train = load_model(trained / "run").evaluate("train")
    assert (train.split_name, len(train.split)) == ("train", 2000)
    with pytest.raises(ConfigError, match="split validation: the dataset has only train and test images"):
        load_model(trained / "run").evaluate("validation")


def test_a_mapped_split_can_be_larger_than_memory(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_mapped_images(dataset: Dataset, data: DataConfig) -> Dataset:
        return replace(dataset, test=replace(dataset.test, is_mapped=True))

    monkeypatch.setattr("vitmnist.inference.evaluation.hold_out_and_normalize", with_mapped_images)
    monkeypatch.setattr("vitmnist.runtime.memory.measure_free_memory", lambda device: 0)
    assert len(load_model(trained / "run").evaluate().split) == 300


def test_another_dataset_is_not_divided_as_that_of_the_run(trained: Path, tmp_path: Path) -> None:
    """It has nothing to hold out, because the run was not trained on it."""
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    recorded = yaml.safe_load((folder / CONFIG_FILE).read_text())
    pictures = compose(["data/dataset=image_folder", "data.dataset.path=digits"]).data.dataset
    recorded["data"] |= {"holdout": 50, "dataset": OmegaConf.to_container(pictures)}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(recorded))
    on_mnist = load_model(folder).evaluate(
        overrides=["data/dataset=mnist", "data.dataset.test_size=100", "data.holdout=null"]
    )
    assert (on_mnist.split_name, len(on_mnist.split)) == ("test", 100)


@pytest.mark.parametrize(("program", "options"), [(evaluate_main, []), (export_main, ["--format=torch"])])
def test_a_split_without_images_is_one_message(
    trained: Path, call_here: CallHere, monkeypatch: pytest.MonkeyPatch, program: Callable[[], None], options: list[str]
) -> None:
    def without_test_images(dataset: Dataset, data: DataConfig) -> Dataset:
        return replace(dataset, test=dataset.train.subset(slice(0)))

    monkeypatch.setattr("vitmnist.inference.evaluation.hold_out_and_normalize", without_test_images)
    ended = call_here(program, "run", *options, folder=trained)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "error: the split to evaluate has no images")
    assert "Traceback" not in ended.stderr


def test_weights_are_chosen_by_name_and_verified(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    checkpoints = folder / "checkpoints"
    assert not (checkpoints / "best.pt").exists(), "selected on the test split"
    storage.write_checkpoint(folder, storage.read_newest_checkpoint(folder), is_best=True)
    for name in ("final", "best", "last"):
        assert load_model(folder, name, "cpu").weights.stem == name
    (checkpoints / "best.pt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"best\.pt: is damaged"):
        load_model(folder, "best", "cpu")
    for name in ("best.pt", "final.safetensors"):
        (checkpoints / name).unlink()
    assert load_model(folder, device="cpu").weights.stem == "last"
    with pytest.raises(ConfigError, match="holds no final weights"):
        load_model(folder, "final", "cpu")


def test_classes_are_matched_by_name_and_sizes_must_fit(succeed: Printed, tmp_path: Path) -> None:
    folder, names = tmp_path / "pictures", ["cat", "dog", "eel"]
    for name in names:
        for path in write_pictures(folder / name, 6).glob("*/*"):
            path.rename(folder / name / path.name)
    root = f"data.root={tmp_path / 'root'}"
    data = ["data/dataset=image_folder", f"data.dataset.path={folder}", root, "model=cnn"]
    succeed(*data, "epochs=1", "hydra.run.dir=run")
    run, other = tmp_path / "run", tmp_path / "other"
    for name in names[1:]:  # without the first class, the others would be counted from 0
        shutil.copytree(folder / name, other / name)
    all_others = [f"data.dataset.path={other}", "data.dataset.test_share=0", root]
    evaluation = load_model(run).evaluate(overrides=all_others)
    assert set(evaluation.predictions.labels.tolist()) == {1, 2}
    with pytest.raises(ConfigError, match=r"the model takes images \[3, 28, 28\], the dataset has \[3, 9, 9\]"):
        load_model(run).evaluate(overrides=[*all_others, "data.dataset.size=9"])
    shutil.move(other / "eel", other / "zebra")
    with pytest.raises(ConfigError, match="classes that the model does not know: zebra; it knows cat, dog, eel"):
        load_model(run).evaluate(overrides=all_others)
