"""Random transforms on tensors in place of PIL images: the same transforms, and pixels that differ by rounding."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.support.pictures import Pictures, assert_same, draw, replaced_as_well, run
from vitmnist import from_dataloader
from vitmnist.errors import ConfigError

FLIPS = [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip()]
NORMALIZE = v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
CLOSE = [v1.ToTensor(), NORMALIZE]
RESIZED = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ColorJitter(0.2, 0.2), *CLOSE])


class Noisy:
    """A random transform that takes tensors too, with a generator of its own."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(5)

    def __call__(self, image: Any) -> Any:
        if self.numbers.random() < 0.5:
            return image
        return image.rotate(180) if isinstance(image, Image.Image) else image.flip(1, 2)


TRANSFORMS: dict[str, list[Any]] = {
    "v1": [*FLIPS, *CLOSE],
    "v2": [v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), NORMALIZE],
    "converted": [*FLIPS, v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), NORMALIZE],
    "erased before": [*FLIPS, v1.ToTensor(), v1.RandomErasing(1.0), NORMALIZE],
    "resized before": [v1.Resize((20, 20)), *FLIPS, *CLOSE],
    "tensors before": [v1.Resize((20, 20)), v1.ToTensor(), *FLIPS, NORMALIZE],
    "images alone": [v2.RandomCrop(8), v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None})],
    "once alone": [v1.Resize((20, 20)), v1.RandomApply([], 0.5), *CLOSE],
    "own generator": [Noisy(), v1.RandomCrop(16), *CLOSE],
}


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_batches_are_equal_where_nothing_is_resized(transforms: list[Any], folder: Path) -> None:
    for workers in (0, 1):

        def build(workers: int = workers) -> DataLoader[Any]:
            return DataLoader(Pictures(folder, deepcopy(v1.Compose(transforms))), 4, shuffle=True, num_workers=workers)

        original, replaced = replaced_as_well(build, transforms="tensor")
        assert_same(run(replaced, 1), run(original, 1))


def test_resizing_rounds_differently(folder: Path) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(datasets.ImageFolder(str(folder), RESIZED), 4, shuffle=True)

    original, replaced = replaced_as_well(build, transforms="tensor")
    for (ours, our_labels), (theirs, labels) in zip(run(replaced), run(original), strict=True):
        assert torch.equal(our_labels, labels)
        assert (ours - theirs).abs().mean() < 0.05 if ours.dim() else torch.equal(ours, theirs)


class ToTensor:
    """Not the one of torchvision, although it has its name."""

    def __call__(self, image: Any) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() if isinstance(image, Image.Image) else image


def inverted(image: Image.Image) -> Image.Image:
    """A random transform for PIL images alone."""
    return image.point(lambda value: 255 - value) if torch.rand(()) < 0.5 else image


def converted(image: Any, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Floats of a picture, and something else of a tensor."""
    return v1.ToTensor()(image) if isinstance(image, Image.Image) else convert(image)


class Joint(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = v2.Compose([v2.RandomCrop(8), v2.PILToTensor()])

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.transforms(draw(index), draw(index, "L"))


DIFFER = r"pixels differ by up to \d+ of 255 from .*, more than the 8 of rounding; use transforms='exact'"
REFUSED: dict[str, tuple[list[Any], str]] = {
    "PIL alone": ([*FLIPS, inverted, *CLOSE], r"sample \d+: inverted raised .*; use transforms='exact'"),
    "a name like torchvision's": (
        [*FLIPS, ToTensor(), NORMALIZE],
        r"sample \d+: Normalize raised .*; use transforms='exact'",
    ),
    "floats": ([*FLIPS, partial(converted, convert=lambda tensor: tensor.div(255).round())], f"sample 0: {DIFFER}"),
    "no antialiasing": ([v1.RandomResizedCrop(9, (0.9, 1.0), antialias=False), *CLOSE], f"sample 0: {DIFFER}"),
    "other shapes": (
        [*FLIPS, partial(converted, convert=lambda tensor: tensor[:, :1])],
        r"sample 0: its transforms make torch.uint8 \[3, 1, 16\] of a tensor, and torch.float32 .*; use transforms='ex",
    ),
    "no tensors": (
        FLIPS,
        r"sample 0: its transforms make torch.uint8 .* of a tensor, and Image of a PIL image; use tr",
    ),
}


@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")
@pytest.mark.parametrize(("transforms", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_transforms_that_do_something_else_to_tensors_are_refused(
    transforms: list[Any], message: str, folder: Path
) -> None:
    dataset = Pictures(folder, v1.Compose(transforms))
    with pytest.raises(ConfigError, match=f"^transforms='tensor': {message}"):
        from_dataloader(DataLoader(dataset, 4, collate_fn=list), "ram", transforms="tensor")
    assert list(from_dataloader(DataLoader(dataset, 4, collate_fn=list), "ram"))


def test_transforms_that_treat_a_second_tensor_otherwise_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^transforms='tensor': .* gets more than a picture; use transforms='exact'"):
        from_dataloader(DataLoader(Joint(), 4), "ram", transforms="tensor")


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "cutmix": lambda samples: v2.CutMix(num_classes=20)(*default_collate(samples)),
    "mixup": lambda samples: v2.MixUp(num_classes=20)(*default_collate(samples)),
    "nested": lambda samples: {"x": [default_collate(samples)], "n": len(samples)},
}


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES.keys())
def test_collate_functions_get_finished_pictures(collate: Callable[[Any], Any], folder: Path) -> None:
    def build() -> DataLoader[Any]:
        dataset = Pictures(folder, v1.Compose([*FLIPS, *CLOSE]))
        return DataLoader(dataset, 4, shuffle=True, collate_fn=collate)

    original, replaced = replaced_as_well(build, transforms="tensor")
    assert_same(run(replaced), run(original))


def test_datasets_of_one_loader_may_have_other_transforms(folder: Path) -> None:
    few, many = (v1.Compose([*FLIPS, v1.ToTensor(), v1.Normalize(mean, 0.5)]) for mean in (0.4, 0.6))
    original, replaced = replaced_as_well(
        lambda: DataLoader(ConcatDataset([Pictures(folder, few), Pictures(folder, many)]), 8, True),
        transforms="tensor",
    )
    assert_same(run(replaced), run(original))


def test_pictures_of_sixteen_bits_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for number in range(40):
        draw(number, "I;16" if number == 37 else "L").save(tmp_path / "all" / f"{number:02}.png")
    dataset = Pictures(tmp_path, v1.Compose([v1.RandomCrop(9), v1.PILToTensor()]), convert=None)
    with pytest.raises(
        ConfigError, match=r"sample 37: pictures of mode I;16 are no tensors of bytes; convert them to L or RGB"
    ):
        from_dataloader(DataLoader(dataset, 16, collate_fn=list), "ram", transforms="tensor")
