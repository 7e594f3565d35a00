"""Runs train on a folder of images, and evaluate its splits or another folder."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import CallHere, Printed, Train, result_of
from tests.support.image_folders import CLASSES, load, overrides, table, write_image
from vitmnist.cli.export import describe_model
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import config_field, validate
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, make_dataset
from vitmnist.data.images import ReadImage, to_tensor
from vitmnist.errors import DataError
from vitmnist.inference.trained_model import load_model
from vitmnist.registry import Member
from vitmnist.runtime import memory
from vitmnist.tracking.resume import describe_completed


@pytest.mark.parametrize("loader", ["gpu_slice", "ram"])
def test_the_test_set_must_fit_next_to_the_training_set(
    loader: str, folder: Path, refuse: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets = load(folder)
    free = iter([pets.train.nbytes + pets.test.nbytes - 1, pets.test.nbytes - 1])
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: next(free))
    printed = refuse(*overrides(folder), f"data/loader={loader}", "device=cpu")
    assert re.search(rf"{loader}: the dataset takes .* are free; try data/loader=", printed)


def test_a_folder_of_images_can_be_trained_on(
    folder: Path, train_here: Train, succeed: Printed, call_here: CallHere, tmp_path: Path
) -> None:
    (folder / "dog" / "3.png").write_bytes(b"")
    options = ["data.dataset.skip_unreadable=true", "data.dataset.size=[14,28]", "hydra.run.dir=run", "epochs=1"]
    assert "evaluated on the test split, 6 images" in succeed(*overrides(folder), *options)
    result = result_of(tmp_path / "run")
    recorded = result["config"]["data"]["dataset"]
    assert (result["dataset"]["skipped"], recorded["name"], recorded["mode"]) == (1, "image_folder", "rgb")
    trained = load_model(tmp_path / "run", device="cpu")
    assert (trained.image_shape, trained.dataset["mode"]) == ((3, 14, 28), "rgb")
    assert trained(folder / "dog" / "4.png")[0] == trained(Image.open(folder / "dog" / "4.png"))[0]
    assert call_here("evaluate", "run").stderr == ""
    assert "divided its images differently" in call_here("evaluate", "run", "data.dataset.test_share=0.5").stderr
    # A sweep compares a completed job with the values that it composes again, such as `mode: auto`.
    assert describe_completed(tmp_path / "run", validate(Config, compose([*overrides(folder), *options])))
    copy = shutil.copytree(folder, tmp_path / "copy")
    for number in range(10):
        shutil.copy(folder / "dog" / "4.png", folder / "dog" / f"new-{number}.png")
    ended = call_here("evaluate", "run", f"data.root={tmp_path / 'root'}")  # this folder has no decoded images
    assert "warning: the images of the test split have changed since training" in ended.stderr
    assert train_here("resume=run", f"data.dataset.path={copy}", "epochs=2").returncode == 0
    refused = train_here(*overrides(folder), "epochs=1")
    assert (refused.returncode, "3.png" in refused.stderr, "Traceback" in refused.stderr) == (1, True, False)


def test_images_of_16_and_32_bits_are_predicted_as_evaluated(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    for number, path in enumerate(sorted(folder.glob("*/*.png"))):
        Image.fromarray(np.full((9, 9), 0.01 * number, np.float32)).save(path.with_suffix(".tif"))
        Image.fromarray(np.random.default_rng(number).integers(0, 65_536, (14, 20), dtype=np.uint16)).save(path)
    typed = [*overrides(folder), "data.dataset.range_32_bit=[0,0.5]", "data.dataset.resize=pad", "model=cnn"]
    assert train_here(*typed, "hydra.run.dir=run", "epochs=1").returncode == 0
    model = load_model(tmp_path / "run", device="cpu")
    evaluation = model.evaluate(overrides=["data.dataset.test_share=0"]).split
    for name in ("dog/7.tif", "dog/7.png"):
        pixels = evaluation.images[evaluation.files.names.index(name)]
        assert np.array_equal(model.reader(folder / name)[..., 0], pixels[0])
    assert pixels.float().std() > 0
    assert '"range_32_bit": [\n      0.0,\n      0.5\n    ]' in describe_model(model)


def test_epochs_are_evaluated_on_val_and_the_test_split_once(
    divided: Path, succeed: Printed, refuse: Printed, tmp_path: Path
) -> None:
    data = [*overrides(divided), "model=cnn"]
    printed = succeed(*data, "epochs=2", "hydra.run.dir=run")
    assert "evaluated on the validation split, 9 images" in printed
    result = result_of(tmp_path / "run")
    assert (result["eval_split"], result["test"]["weights"]) == ("validation", "best")
    assert [result["dataset"][f"{key}_size"] for key in ("train", "validation", "test")] == [12, 9, 6]
    assert "the dataset has a validation split of 9 images" in refuse(*data, "data.holdout=2")
    shutil.rmtree(divided / "val")
    shutil.rmtree(divided / "test")
    alone = [*data, "data.dataset.test_share=0", "epochs=1"]
    assert "images: has neither validation nor test images; set data.holdout=0.1" in refuse(*alone)
    succeed(*alone, "data.holdout=0.25", "hydra.run.dir=alone")
    assert (result_of(tmp_path / "alone")["eval_split"], result_of(tmp_path / "alone")["test"]) == ("validation", None)


def test_another_folder_is_evaluated_as_the_user_says(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    data = [*overrides(folder), "model=cnn"]
    parts = ["data.dataset.train_size=20", "data.dataset.test_size=4", "data.holdout=5"]
    assert train_here(*data, *parts, "epochs=1", "hydra.run.dir=run").returncode == 0
    for name in CLASSES:
        write_image(tmp_path / "other" / name / "only.png", 5)
        write_image(tmp_path / "other" / name / "second.png", 6)
    (tmp_path / "table.csv").write_text("\n".join(table(folder, "file,label")))
    division = "data.holdout={} data.dataset.train_size={} data.dataset.test_size={} data.dataset.test_share={}"
    undivided, as_trained = division.format("null", "null", "null", 0), division.format(5, 20, 4, 0.2)
    for other, images, split in (
        ([], 5, "validation"),
        (["data.dataset.path=other", *undivided.split()], 6, "all"),
        (["data.dataset.path=other", *undivided.split(), "data.dataset.test_share=0.5"], 3, "test"),
        (["data.dataset.labels=table.csv", *as_trained.split()], 5, "validation"),
    ):
        ended = call_here("evaluate", "run", "--json", data[2], *other)
        printed = json.loads(ended.stdout.splitlines()[-1])
        assert (printed["images"], printed["split"]) == (images, split)
    ended = call_here("evaluate", "run", data[2], "data.dataset.path=other")
    assert ended.returncode == 1
    assert f"another path; set {undivided} to evaluate all of these images, or {as_trained} to divide" in ended.stderr


@pytest.mark.needs("POSIX files")
def test_the_images_of_a_run_keep_their_splits_at_any_path(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    """No training image is evaluated, whether the path is written in another way, or the folder was moved."""
    _, _, root = overrides(folder)
    parts = ["data.holdout=5", "data.dataset.train_size=20", "data.dataset.test_size=4"]
    typed = ["data/dataset=image_folder", "data.dataset.path=images", root, *parts]
    assert train_here(*typed, "model=cnn", "epochs=1", "hydra.run.dir=run").returncode == 0

    def evaluated(path: object, *options: str) -> list[str]:
        typed = ["run", root, f"data.dataset.path={path}", *options, "--json", "--predictions"]
        ended = call_here("evaluate", *typed)
        assert ("split have changed since training" in ended.stderr) == is_changed
        return [row["image"] for row in json.loads(ended.stdout.splitlines()[-1])["predictions"]]

    is_changed = False
    expected = evaluated("images")
    (tmp_path / "link").symlink_to("images")
    for path in ("./images", folder, "link"):
        assert evaluated(path) == expected
    folder.rename(tmp_path / "moved")
    assert evaluated("moved", "data.dataset.test_share=0.2", *parts) == expected
    for number in range(10):
        write_image(tmp_path / "moved" / "cat" / f"{number}.png", 1000 + number)
    is_changed = True
    assert evaluated("moved", "data.dataset.test_share=0.2", *parts) == expected
    (tmp_path / "moved").rename(folder)
    assert evaluated("./images") == expected


@dataclass
class ScansOptions(SizeOptions):
    """Files of NumPy arrays with twice the side of the images, each next to a file with its white level."""

    path: str = config_field(may_change_on_resume=True)
    side: int = 14

    @property
    def reader(self) -> ReadImage:
        """A reader that averages blocks of pixels, and only reads NumPy files."""

        def read(path: Path) -> Image.Image:
            if path.suffix != ".npy":
                raise DataError(f"{path}: is no scan")
            blocks = np.load(path).reshape(self.side, 2, self.side, 2)
            white = int(path.with_suffix(".txt").read_text())
            return Image.fromarray(white - blocks.mean(axis=(1, 3)).astype(np.uint8))

        return read


def scans(options: ScansOptions, root: Path) -> Dataset:
    files = sorted(Path(options.path).glob("*.npy"))
    images = torch.stack([to_tensor(options.reader(file)) for file in files])
    pair = images, torch.arange(len(files)) % 2
    return make_dataset("scans", pair, pair, ("even", "odd"), options)


def test_predict_and_the_card_read_files_as_the_dataset_does(
    tmp_path: Path, succeed: Printed, call_here: CallHere, output_of: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DATASETS.temporarily(scans=Member(ScansOptions, scans)):
        (tmp_path / "scans").mkdir()
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 256, (28, 28), dtype=np.uint8)
            np.save(tmp_path / "scans" / f"{number}.npy", pixels)
            (tmp_path / "scans" / f"{number}.txt").write_text(str(255 - number))
        data = ["~data/dataset", "+data.dataset={name:scans,path:scans,side:14,train_size:null,test_size:null}"]
        succeed(*data, "model=cnn", "epochs=1", "batch_size=3", "hydra.run.dir=run")
        model = load_model(tmp_path / "run", device="cpu")
        assert model.dataset["side"] == 14
        assert "path" not in model.dataset, "a folder of this machine is none of the weights' business"
        evaluated = json.loads(call_here("evaluate", "run", "--json", "--predictions").stdout.splitlines()[-1])
        files = [f"scans/{number}.npy" for number in range(6)]
        predicted = json.loads(call_here("predict", "run", "--json", *files).stdout)
        for row, found in zip(evaluated["predictions"], predicted, strict=True):
            assert found["probability"] == pytest.approx(row["probability"], abs=1e-6)
        Image.new("L", (28, 28)).save(tmp_path / "other.png")
        assert "other.png: is no scan" in call_here("predict", "run", "other.png").stderr
        assert len(model(np.zeros((2, 14, 14, 1), np.uint8))) == 2
        for image in (Image.new("L", (28, 28)), np.zeros((28, 28), np.uint8)):
            with pytest.raises(DataError, match=r"scans has its own reader of files; .* uint8 arrays \[1, 14, 14\]"):
                model(image)
        np.save(tmp_path / "large.npy", np.zeros((28, 28), dtype=np.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(ScansOptions, "reader", property(lambda options: lambda path: Image.new("L", (9, 9))))
            refused = call_here("predict", "run", "large.npy")
        assert "large.npy: is read as torch.uint8 (1, 9, 9), and the model takes uint8 (1, 14, 14)" in refused.stderr
        output_of("export", "run", "--format=torch", "--output=model.pt2")
        assert json.loads((tmp_path / "model.pt2.json").read_text())["read_by"] == "the dataset scans"
        succeed("resume=run", "epochs=2")
    ended = call_here("predict", "run", *files)
    assert (ended.returncode, "data.dataset.name=scans: not known" in ended.stderr) == (1, True)
