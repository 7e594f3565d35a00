"""Writes folders of images, and loads them as datasets."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitmnist import load_dataset, make_loader
from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.images import to_tensor

CLASSES = ("cat", "dog", "eel")


def write_image(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (20, 14)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_folder(folder: Path) -> Path:
    """Write ten images of each of three classes."""
    for label, name in enumerate(CLASSES):
        for number in range(10):
            write_image(folder / name / f"{number}.png", 100 * label + number)
    return folder


def load(folder: Path, **options: object) -> Dataset:
    return load_dataset("image_folder", root=str(folder.parent / "root"), path=str(folder), **options)


def overrides(folder: Path) -> list[str]:
    """The overrides for training on a folder."""
    return ["data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={folder.parent / 'root'}"]


def check_loaders(train: Split) -> None:
    preprocess = Preprocess(train)
    for name, options in {"ram": {}, "gpu_slice": {}, "cache": {}, "prefetch": {}, "disk": {"num_workers": 0}}.items():
        with make_loader(name, train, batch_size=24, device="cpu", seed=0, shuffle="none", **options) as loader:
            ((images, labels),) = loader.epoch(0)
        assert torch.equal(preprocess(images), preprocess(train.images)), name
        assert torch.equal(labels, train.labels), name


SIZES = {"train": 4, "val": 3, "test": 2}  # images of each class


def table(folder: Path, columns: str = "file,label,split") -> list[str]:
    """The lines of a CSV file of all images of a folder."""
    rows = [columns]
    for path in sorted(folder.rglob("*.png")):
        name = path.relative_to(folder)
        cells = {"file": str(name), "label": path.parent.name, "split": name.parts[0]}
        rows.append(",".join(cells[column] for column in columns.split(",")))
    return rows


def sizes(dataset: Dataset) -> dict[str, int]:
    return {name: len(split) for name, split in dataset.splits.items()}


def assert_as_drawn(dataset: Dataset, folder: Path) -> None:
    """Every image of `divided` is in its split, with its label and pixels."""
    assert sizes(dataset) == {"train": 12, "validation": 9, "test": 6}
    for name, split in dataset.splits.items():
        names = split.files.names
        assert {Path(file).parts[0] for file in names} == {"val" if name == "validation" else name}
        assert [dataset.train.classes[label] for label in split.labels] == [Path(file).parts[1] for file in names]
        for index in (0, len(split) - 1):
            assert torch.equal(to_tensor(split.files[index]), split.images[index])
        assert (split.mean, split.std) == compute_statistics(dataset.train.images)
