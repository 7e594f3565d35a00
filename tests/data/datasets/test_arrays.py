"""Arrays of NumPy, in a file or in a folder that is mapped, are trained on and used later."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import CallHere, Printed, result_of
from vitmnist import load_dataset
from vitmnist.errors import ConfigError, DataError
from vitmnist.inference.trained_model import load_model

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (30, 10, 14, 3), dtype=np.uint8)
LABELS = np.arange(30) % 3


def write(path: Path, **arrays: Any) -> Path:
    """Write an `.npz` file, or a folder of `.npy` files."""
    if path.suffix:
        np.savez(path, **arrays)
        return path
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def load(path: Path, **options: Any) -> Any:
    return load_dataset("arrays", path=str(path), **options)


@pytest.mark.parametrize("name", ["all.npz", "all"])
@pytest.mark.parametrize(("layout", "channels"), [((0, 1, 2, 3), 3), ((0, 3, 1, 2), 3), (None, 1)])
@pytest.mark.parametrize("is_float", [False, True])
def test_images_of_every_layout_and_dtype_are_read(
    name: str, layout: Any, channels: int, is_float: bool, tmp_path: Path
) -> None:
    images = PIXELS.transpose(layout) if layout else PIXELS[..., 0]
    options = {"statistics": {"mean": [0.5], "std": [0.25]}} if is_float else {}
    stored = ((images / 255 - 0.5) / 0.25).astype(np.float32) if is_float else images
    path = write(tmp_path / name, images=stored, labels=LABELS, test_images=stored[:9], test_labels=LABELS[:9, None])
    dataset = load(path, test_size=7, **options)
    expected = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)[:, :channels]
    assert torch.equal(dataset.train.images, expected)
    assert torch.equal(dataset.test.images, expected[:7])
    assert dataset.train.is_mapped == (name == "all" and not is_float)
    dataset.train.images[0] = 0  # This changes a copy of the page, not the file.
    assert torch.equal(load(path, **options).train.images, expected)


def test_a_run_on_arrays_is_resumed_and_used(
    tmp_path: Path, succeed: Printed, call_here: CallHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = np.array(["ash", "elm", "oak"])[LABELS]
    write(tmp_path / "x.npz", x_train=PIXELS, y_train=names, x_val=PIXELS[:6], y_val=names[:6])
    data = ["data/dataset=arrays", "data.dataset.path=x.npz", "data.dataset.names.images=x_train"]
    keys = ["data.dataset.names.labels=y_train", "data.dataset.names={val_images:x_val,val_labels:y_val}"]
    succeed(*data, *keys, "model=cnn", "epochs=1", "hydra.run.dir=run")
    (tmp_path / "x.npz").rename(tmp_path / "moved.npz")
    succeed("resume=run", "data.dataset.path=moved.npz", "epochs=2")
    assert len(result_of(tmp_path / "run")["epochs"]) == 2
    typed = ["run", "data.dataset.path=moved.npz", "--json", "--predictions", "--weights=last"]
    rows = json.loads(call_here("evaluate", *typed).stdout.splitlines()[-1])["predictions"]
    assert [row["true_class"] for row in rows] == [*names[:6]]
    Image.fromarray(PIXELS[0]).save(tmp_path / "0.png")
    (predicted,) = json.loads(call_here("predict", "run", "--json", "--weights=last", "0.png").stdout)
    assert predicted["probability"] == pytest.approx(rows[0]["probability"], abs=1e-6)
    assert load_model(tmp_path / "run", "last", "cpu")(PIXELS[0])[0].label == rows[0]["predicted_class"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.array([{}] * 30)}, "images is damaged, or is no array of numbers or text; write arrays with"),
        ({"images": PIXELS / 255}, r"images and labels: floats need data\.dataset\.statistics=\{mean: \[\.\.\], std: "),
        ({"images": PIXELS.astype(np.int32)}, r"images and labels: must be uint8 or floats, found int32; convert"),
        ({"images": np.zeros((30, 4, 16, 1), np.uint8)}, r"found \[30, 4, 16, 1\]; must be .* 1, 3 or 4 channels C"),
        ({"images": np.zeros((30, 13, 16, 16), np.uint8)}, r"found \[30, 13, 16, 16\]; .* 1, 3 or 4 chan"),
        ({"images": PIXELS.astype(">f4")}, "images and labels: images: torch cannot use this array: "),
        ({"labels": LABELS / 2}, r"images and labels: labels must be integers or text \[N\], N > 0, found float64"),
        ({"labels": LABELS[:9]}, "30 images, but 9 labels"),
        ({"test_images": PIXELS}, r"has no array test_labels; set data\.dataset\.names\.test_images and test_labels"),
        ({"test_images": PIXELS, "test_labels": LABELS + 1}, "test_labels: classes without training images: 3$"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name in ("all.npz", "all"):
        with pytest.raises(DataError, match=message):
            load(write(tmp_path / name, **{"images": PIXELS, "labels": LABELS, **arrays}))


def test_floats_of_other_statistics_and_damaged_files_are_refused(tmp_path: Path) -> None:
    options = {"statistics": {"mean": [0], "std": [1]}}
    path = write(tmp_path / "all.npz", images=np.where(PIXELS > 250, np.nan, PIXELS), labels=LABELS)
    with pytest.raises(DataError, match=r"floats become nan to nan, and must become 0 to 1"):
        load(path, **options)
    write(path, images=PIXELS * 1.0, labels=LABELS)
    with pytest.raises(DataError, match=r"floats become 0 to 255, and must become 0 to 1"):
        load(path, **options)
    with pytest.raises(DataError, match=r"data\.dataset\.statistics has 2 channels, the images 3"):
        load(path, statistics={"mean": [0, 0], "std": [1, 1]})
    for content in (path.read_bytes()[:-400], b"", pickle.dumps({"images": PIXELS})):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"all\.npz: images is damaged, or is no array of numbers or text"):
            load(path, **options)
    with pytest.raises(ConfigError, match=r"data\.dataset\.path=none\.npz: there is no such \.npz file or folder"):
        load(Path("none.npz"))
