"""Small folders of pictures of different sizes, and datasets that read them as scripts do."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.support.processes import REPOSITORY
from vitmnist import from_dataloader
from vitmnist.runtime.random_state import seed_generators
from vitmnist.store.tree import find_difference

COUNT = 18
PHOTOS = REPOSITORY / "docs" / "examples" / "photos.py"


def draw(seed: int, mode: str = "RGB") -> Image.Image:
    """A picture of smooth noise, with sides of 20 to 39 pixels."""
    numbers = np.random.default_rng(seed)
    width, height = (int(side) for side in numbers.integers(20, 40, 2))
    bands = {"L": 1, "P": 1, "RGBA": 4}.get(mode, 3)
    if mode == "I;16":
        return Image.fromarray(numbers.integers(0, 60_000, (height, width), dtype=np.uint16))
    image = smooth(numbers, (width, height), bands)
    return image.convert("RGB").quantize(7) if mode == "P" else image


def smooth(seed: int | np.random.Generator, size: tuple[int, int], bands: int = 3) -> Image.Image:
    """Colours that change slowly, as in photographs."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 5, bands), dtype=np.uint8)
    return Image.fromarray(coarse.squeeze()).resize(size, Image.Resampling.BILINEAR)


def write_pictures(folder: Path, count: int = COUNT, suffix: str = "jpg") -> Path:
    """Two classes of pictures, as `ImageFolder` reads them."""
    for number in range(count):
        path = folder / f"class{number % 2}" / f"{number:03}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(number).save(path)
    return folder


def draw_photos(count: int) -> None:
    """Draw some of the pictures of the example into `photos` in the current folder."""
    drawing, _, _ = PHOTOS.read_text().partition("\nphotos = ")
    assert drawing.count("PICTURES = 2000\n") == 1
    exec(drawing.replace("PICTURES = 2000\n", f"PICTURES = {count}\n"), {})


class Pictures(Dataset[Any]):
    """Pictures and labels. Each read opens, transforms and closes the file, as in most scripts.

    Args:
        convert: mode of the pictures; None leaves that of the file.
    """

    def __init__(
        self, folder: Path, transform: Callable[[Any], Any] | None = None, convert: str | None = "RGB"
    ) -> None:
        self.paths = sorted(folder.glob("*/*.*"))
        self.transform, self.convert = transform, convert
        self.root = folder

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> Image.Image:
        with Image.open(self.paths[index]) as image:
            return image.convert(self.convert) if self.convert else image.copy()

    def __getitem__(self, index: int) -> Any:
        image: Any = self.open(index)
        return (self.transform(image) if self.transform else image), index


def collect(loader: Any, epochs: int = 2, end: int | None = None) -> list[Any]:
    """All batches of some epochs, with a random number of the global generator after each epoch."""
    seed_generators(3, 0, 0)
    batches: list[Any] = []
    for _ in range(epochs):
        batches += [*islice(loader, end), torch.rand(2)]
    return batches


def replaced_as_well(build: Callable[[], DataLoader[Any]], **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A DataLoader, and the replacement of an equal one."""
    return build(), from_dataloader(build(), **{"loader": "ram", **options})


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    """Assert that batches are equal, bit for bit."""
    assert len(actual) == len(expected)
    assert [find_difference(*pair) for pair in zip(actual, expected, strict=True)] == [None] * len(actual)


def check_same(build: Callable[[], DataLoader[Any]], **options: Any) -> DataLoader[Any]:
    """Assert that a replacement gives the original's batches, which differ from epoch to epoch. Returns it."""
    original, replaced = replaced_as_well(build, **options)
    expected = collect(original)
    assert_same(collect(replaced), expected)
    half = len(expected) // 2
    assert any(find_difference(*pair) for pair in zip(expected[: half - 1], expected[half:-1], strict=True))
    return replaced
