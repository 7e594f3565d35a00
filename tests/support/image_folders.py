"""Writes folders of images, and loads them as datasets."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitmnist import load_dataset, make_loader
from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Dataset, Split

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
