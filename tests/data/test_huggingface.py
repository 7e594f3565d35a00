"""Hugging Face datasets: rows become pairs, the same from every loader, and are decoded once for all processes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from vitmnist import Preprocess, make_loader
from vitmnist.data import decoding
from vitmnist.errors import ConfigError, DataError

SIZE = 23
ORDER = {"batch_size": SIZE, "device": "cpu", "seed": 0, "shuffle": "none"}
GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (SIZE, 6, 5, 3), dtype=np.uint8)
LABELS = GENERATOR.integers(0, 3, SIZE).tolist()


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    import datasets  # takes 2 s

    return datasets


@pytest.fixture
def pictures(hf: ModuleType) -> Any:
    """PNG pictures with classes, and a column that is neither."""
    features = {"img": hf.Image(), "id": hf.Value("int64"), "label": hf.ClassLabel(names=["cat", "dog", "eel"])}
    columns = {"img": [Image.fromarray(image) for image in PIXELS], "id": list(range(SIZE)), "label": LABELS}
    return hf.Dataset.from_dict(columns, features=hf.Features(features))


def deliver(rows: Any, name: str = "ram", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows in one batch."""
    with make_loader(name, rows, **ORDER, **options) as loader:
        (batch,) = loader.epoch(0)
    return batch


def test_pictures_and_classes_become_the_same_pairs_in_every_loader(pictures: Any, tmp_path: Path) -> None:
    for rows, name, options in (
        (pictures, "ram", {}),
        (pictures.with_format("torch"), "ram", {}),
        (pictures.with_format("numpy", columns=["id"]), "ram", {}),
        (pictures, "cache", {"folder": str(tmp_path)}),
        (pictures, "disk", {"num_workers": 0}),
        (pictures, "prefetch", {"base": {"name": "disk", "num_workers": 0}}),
    ):
        images, labels = deliver(rows, name, **options)
        assert torch.equal(images, torch.stack([pil_to_tensor(Image.fromarray(image)) for image in PIXELS]))
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert labels.tolist() == LABELS
    assert Preprocess(pictures).mean.numel() == 3


@pytest.mark.parametrize("kind", ["Array2D", "Array3D", "lists", "lists of floats"])
def test_columns_of_arrays_become_pairs(hf: ModuleType, kind: str) -> None:
    """With the dtype of the column; two dimensions get a channel."""
    arrays = {
        "Array2D": PIXELS[..., 0],
        "Array3D": PIXELS.transpose(0, 3, 1, 2),
        "lists": PIXELS[..., 0],
        "lists of floats": PIXELS[..., 0].astype(np.float32) / 255,
    }[kind]
    features = {
        "Array2D": {"image": hf.Array2D((6, 5), "uint8"), "label": hf.Value("int32")},
        "Array3D": {"image": hf.Array3D((3, 6, 5), "uint8"), "label": hf.Value("uint8")},
    }
    rows = hf.Dataset.from_dict(
        {"image": list(arrays), "label": LABELS}, hf.Features(features[kind]) if kind in features else None
    )
    images, labels = deliver(rows)
    assert images.numpy().dtype == arrays.dtype
    assert np.array_equal(images.numpy(), arrays if arrays.ndim == 4 else arrays[:, None])
    assert labels.dtype == torch.int64
    assert labels.tolist() == LABELS


def test_bits_and_palettes_become_pixels(hf: ModuleType) -> None:
    colours = Image.fromarray(PIXELS[0]).quantize(8)
    bits = Image.fromarray(PIXELS[0]).convert("1")
    for image, mode in ((colours, "RGB"), (bits, "L")):
        rows = hf.Dataset.from_dict(
            {"image": [image], "label": [0]}, hf.Features(image=hf.Image(), label=hf.Value("int8"))
        )
        images, _ = deliver(rows)
        assert torch.equal(images[0], pil_to_tensor(image.convert(mode)))


def test_transforms_are_applied_and_random_ones_are_not_frozen(pictures: Any) -> None:
    def scale(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**batch, "img": [pil_to_tensor(image) / 255 for image in batch["img"]]}

    def noise(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**batch, "img": [torch.rand(2) for _ in batch["img"]]}

    images, _ = deliver(pictures.with_transform(scale))
    assert torch.equal(images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255)
    with pytest.raises(ConfigError, match="sample 0 differs between epochs 0 and 1"):
        deliver(pictures.with_transform(noise))
    with make_loader("disk", pictures.with_transform(noise), **ORDER, num_workers=0) as loader:
        first, again, second = (next(loader.epoch(number))[0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_its_fingerprint_makes_the_cache_persistent(
    pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    original = decoding.RowPairs.__getitems__
    counting = lambda *parts: reads.append(len(parts[1])) or original(*parts)  # noqa: E731
    monkeypatch.setattr(decoding.RowPairs, "__getitems__", counting)
    decoded_again = []
    changed = pictures.select(range(1, SIZE)), pictures.rename_column("id", "number"), pictures
    for rows in (pictures, pictures, *changed):
        reads.clear()
        images, labels = deliver(rows, "cache", folder=str(tmp_path))
        assert torch.equal(images, deliver(rows)[0])
        assert labels.tolist() == rows["label"]
        decoded_again.append(len(rows) in reads)
    assert len(list(tmp_path.glob("*/cache.json"))) == 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a", "b"], "label": [0, 1]}, r"no columns for the image; the dataset has text \(Value\), label"),
        ({"image": [[[1]], [[2]]], "fine": [0, 1]}, r"no columns for the label; .* name one with .*label=COLUMN"),
        ({"image": [[[1]], None], "label": [0, 1]}, "rows from . on: one has no image or no label; leave it out"),
        ({"image": [[[1]], [[1]]], "label": [0, None]}, "rows from . on: one has no image or no label"),
        ({"image": [[[1]], [[1]]], "label": ["a", "b"]}, "the column label: a label must be a number; class_encode"),
        ({"image": [[[1]], [[1]]], "label": [[0, 1], [1, 2]]}, "the column label: a label must be a number"),
        ({"image": [[[1]], [[1, 2]]], "label": [0, 1]}, "samples 0, 1, … do not make a batch: .*the same shape"),
    ],
)
def test_rows_that_are_no_pairs_are_refused_with_the_columns(hf: ModuleType, columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        deliver(hf.Dataset.from_dict(columns))


def test_columns_are_chosen_by_name_and_labels_may_be_floats(hf: ModuleType, pictures: Any) -> None:
    rows = pictures.add_column("score", [number / 8 for number in range(SIZE)]).rename_column("label", "kind")
    rows = rows.add_column("mask", PIXELS[..., 0].tolist())
    images, labels = deliver(rows, image="mask", label="score")
    assert np.array_equal(images[:, 0].numpy(), PIXELS[..., 0])
    assert labels.dtype == torch.float32
    assert labels.tolist() == [number / 8 for number in range(SIZE)]
    assert deliver(rows, label="id")[1].tolist() == list(range(SIZE))
    with pytest.raises(DataError, match=r"no columns for the label; the dataset has img .*, score .*label=COLUMN"):
        deliver(rows, label="scores")
    classes = pictures.add_column("coarse", LABELS).cast_column("coarse", hf.ClassLabel(names=["a", "b", "c"]))
    with pytest.raises(DataError, match="2 columns for the label"):
        deliver(classes)
    with pytest.raises(ConfigError, match="image= and label= name columns of a Hugging Face dataset; tuple is none"):
        deliver((torch.zeros(SIZE, 1), torch.zeros(SIZE)), label="score")


def test_all_splits_at_once_are_refused(hf: ModuleType, pictures: Any) -> None:
    with pytest.raises(DataError, match=r"DatasetDict is neither .* with several splits, give one"):
        deliver(hf.DatasetDict(train=pictures, test=pictures))
