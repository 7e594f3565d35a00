"""Every command reads files as the dataset of the run does, also a custom one."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import CallHere, Printed
from vitmnist.cli.evaluate import main as evaluate_main
from vitmnist.cli.export import main as export_main
from vitmnist.cli.predict import main as predict_main
from vitmnist.config.validation import config_field
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, get_image_reader, make_dataset
from vitmnist.data.images import ColorMode, ImageReader, ReadImage, to_tensor
from vitmnist.errors import DataError
from vitmnist.inference.trained_model import load_model
from vitmnist.registry import Member


@dataclass
class ScansOptions(SizeOptions):
    """Files of NumPy arrays with twice the side of the images, each next to a file with its white level."""

    path: str = config_field(may_change=True)
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
        evaluated = json.loads(call_here(evaluate_main, "run", "--json", "--predictions").stdout.splitlines()[-1])
        files = [f"scans/{number}.npy" for number in range(6)]
        predicted = json.loads(call_here(predict_main, "run", "--json", *files).stdout)
        for row, found in zip(evaluated["predictions"], predicted, strict=True):
            assert found["probability"] == pytest.approx(row["probability"], abs=1e-6)
        Image.new("L", (28, 28)).save(tmp_path / "other.png")
        assert "other.png: is no scan" in call_here(predict_main, "run", "other.png").stderr
        assert len(model(np.zeros((2, 14, 14, 1), np.uint8))) == 2
        for image in (Image.new("L", (28, 28)), np.zeros((28, 28), np.uint8)):
            with pytest.raises(DataError, match=r"scans has its own reader of files; .* uint8 arrays \[1, 14, 14\]"):
                model(image)
        np.save(tmp_path / "large.npy", np.zeros((28, 28), dtype=np.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(ScansOptions, "reader", property(lambda options: lambda path: Image.new("L", (9, 9))))
            refused = call_here(predict_main, "run", "large.npy")
        assert "large.npy: is read as (1, 9, 9), and the model takes (1, 14, 14)" in refused.stderr
        output_of(export_main, "run", "--format=torch", "--output=model.pt2")
        assert json.loads((tmp_path / "model.pt2.json").read_text())["read_by"] == "the dataset scans"
        succeed("resume=run", "epochs=2")
    ended = call_here(predict_main, "run", *files)
    assert (ended.returncode, "data.dataset.name=scans: not known" in ended.stderr) == (1, True)


def test_a_dataset_without_files_of_its_own_reads_any_image_in_its_shape() -> None:
    assert get_image_reader({"name": "mnist"}, (1, 20, 30)) == ImageReader((20, 30), ColorMode.grey)
    recorded = {"name": "image_folder", "size": 9, "mode": "rgb", "resize": "pad", "draft": False}
    assert get_image_reader(recorded, (3, 9, 9)) == ImageReader((9, 9), "rgb", "pad")
