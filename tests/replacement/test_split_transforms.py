"""Samples are decoded once up to their first random transform, and batches equal the original's, bit for bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.support.pictures import Pictures, assert_same, check_same, collect, replaced_as_well
from vitmnist import from_dataloader
from vitmnist.errors import DataError
from vitmnist.replacement.sample_dataset import SampleDataset
from vitmnist.runtime.random_state import RandomState

CROP = v1.RandomResizedCrop(16)
FLIP = v1.RandomHorizontalFlip()
CLOSE = [v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.2,) * 3)]
V1 = v1.Compose([v1.Resize(24), CROP, FLIP, v1.ColorJitter(0.4, 0.4, 0.4), *CLOSE])
V2 = v2.Compose(
    [v2.Resize(24), v2.RandomResizedCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise()]
)


def names_of_splits(loader: DataLoader[Any]) -> list[tuple[list[str], list[str]]]:
    """The names of the transforms that were applied once, and of the others, for each attribute."""
    source = loader.dataset.split_transforms
    return [
        tuple([type(part).__name__ for part in parts] for parts in split)
        for split in zip(source.deterministic, source.random_parts, strict=True)
    ]


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("settings", WORKERS.values(), ids=WORKERS.keys())
def test_batches_are_the_same_with_any_workers_and_after_an_early_break(settings: dict[str, Any], folder: Path) -> None:
    original, replaced = replaced_as_well(lambda: DataLoader(Pictures(folder, V1), 4, shuffle=True, **settings))
    assert isinstance(replaced.dataset, SampleDataset)
    assert replaced.num_workers == original.num_workers
    assert names_of_splits(replaced)[0][0] == ["Resize"]
    for epochs, end in ((1, 2), (2, None)):
        assert_same(collect(replaced, epochs, end), collect(original, epochs, end))
    before = RandomState()
    from_dataloader(original, "ram")
    assert not before.list_changed()


class Noisy:
    """A random transform of a user."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(5)

    def __call__(self, image: Any) -> Any:
        return image + 0.1 * self.numbers.standard_normal()


class Noting:
    """Has keyword arguments and records what it draws, like albumentations."""

    def __init__(self) -> None:
        self.numbers, self.drawn = np.random.RandomState(5), None

    def __call__(self, **images: Any) -> Any:
        self.drawn = [self.numbers.standard_normal(), *([self.drawn] if self.numbers.random() < 0.1 else [])]
        return {name: image + self.drawn[0] for name, image in images.items()}


class Named(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = np.asarray(self.open(index).resize((8, 8))) / 255
        return self.transform(image=image, mask=image[..., 0])["mask"], index


class Rarely:
    """Random for few samples. Only its use of a generator shows it."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.invert(image) if random.random() < 0.01 else image


class Grey:
    """A transform of a user that is not random."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.grayscale(image).convert("RGB")


SMALL = v1.Resize((9, 9))
TRANSFORMS: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "v1": (lambda: [V1], ["Resize"]),
    "v2": (lambda: [V2], ["Resize"]),
    "nested": (lambda: [v1.Compose([v1.Resize(20)]), v2.Compose([SMALL, V1])], ["Resize", "Resize", "Resize"]),
    "sequential": (lambda: [v1.ToTensor(), torch.nn.Sequential(SMALL, FLIP)], ["ToTensor", "Resize"]),
    "choice": (lambda: [SMALL, v1.RandomChoice([v1.ColorJitter(0.5), v1.Grayscale(3)]), *CLOSE], ["Resize"]),
    "wide": (lambda: [SMALL, v1.TrivialAugmentWide(), v1.PILToTensor()], ["Resize"]),
    "custom": (lambda: [SMALL, Grey(), *CLOSE, Noisy()], ["Resize", "Grey", "ToTensor", "Normalize"]),
    "pictures": (lambda: [v1.RandomCrop(16)], []),
}


@pytest.mark.parametrize(("transforms", "once"), TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_are_split_at_the_first_random_transform(
    transforms: Callable[[], list[Any]], once: list[str], folder: Path
) -> None:
    replaced = check_same(lambda: DataLoader(Pictures(folder, v1.Compose(transforms())), 4, True, collate_fn=list))
    assert names_of_splits(replaced)[0][0] == once


def test_a_transform_that_is_rarely_random_runs_in_every_epoch(folder: Path) -> None:
    for rare in (v1.RandomGrayscale(1e-9), v2.RandomGrayscale(1e-9), Rarely(), v1.RandomApply([Grey()], 1e-9)):
        transform = v1.Compose([v1.Resize((8, 8)), rare, v1.ToTensor()])
        replaced = from_dataloader(DataLoader(Pictures(folder, transform), 4), "ram")
        assert names_of_splits(replaced) == [(["Resize"], [type(rare).__name__, "ToTensor"])]


class InMemory(Dataset[Any]):
    """Images that a transform can change in place, because the dataset does not copy them."""

    def __init__(self) -> None:
        self.images, self.transform = torch.rand(20, 3, 8, 8), v1.RandomErasing(inplace=True)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


@pytest.mark.parametrize("name", ["ram", "cache"])
@pytest.mark.parametrize("module", [v1, v2])
def test_transforms_in_place_do_not_change_stored_samples(module: Any, name: str, folder: Path, tmp_path: Path) -> None:
    transform = v1.Compose([SMALL, v1.ToTensor(), module.RandomErasing(0.9, inplace=True)])
    replaced = check_same(lambda: DataLoader(Pictures(folder, transform), 4), loader=name, folder=str(tmp_path))
    assert names_of_splits(replaced)[0][0] == ["Resize", "ToTensor"]
    with pytest.raises(DataError, match="a transform changes data of the dataset in place"):
        from_dataloader(DataLoader(InMemory(), 4), name, folder=str(tmp_path))


@pytest.mark.slow
def test_random_transforms_of_timm(folder: Path) -> None:
    timm = pytest.importorskip("timm.data")
    transform = timm.create_transform(24, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5)
    check_same(lambda: DataLoader(Pictures(folder, transform), 4, num_workers=2))


class Cifar(datasets.VisionDataset):
    """Pictures in memory, as in torchvision's CIFAR."""

    def __init__(self, **transforms: Any) -> None:
        super().__init__("nowhere", **transforms)
        self.data = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)
        self.targets = list(range(20))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, target = Image.fromarray(self.data[index]), self.targets[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, self.target_transform(target) if self.target_transform is not None else target


class Segmented(Cifar):
    """Pictures with masks, and a joint transform of the two."""

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(self.data[index])
        return self.transforms(image, image.convert("L").point(lambda value: value // 128))


class Views(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = self.open(index)
        return self.transform(image), self.transform(image)


class Keyed(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = self.open(index)
        sample = {"id": f"n°{index}", "image": self.transform(image), "size": list(image.size), "share": index / 7}
        return sample | {"known": index > 3, "mean": np.float32(np.mean(image)), "none": torch.zeros(0)}


class InBlock(Pictures):
    """The first transform loads the picture, and the file is closed afterwards."""

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as image:
            return self.transform(image), index


class Wrapping(Dataset[Any]):
    """The usual way to give each part of a `random_split` its transforms."""

    def __init__(self, subset: Any, transform: Any) -> None:
        self.subset, self.transform = subset, transform

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        image, label = self.subset[index]
        return self.transform(image), label


def reassigned(transform: Any) -> Cifar:
    dataset = Cifar(transform=v1.ToTensor())
    dataset.transform = transform  # torchvision keeps the first transform in `transforms`.
    return dataset


CLOSED = v1.Compose([v1.RandomCrop(12, padding=2), FLIP, *CLOSE])
JOINT = v2.Compose([v2.Resize((16, 16)), v2.RandomCrop(9), v2.RandomHorizontalFlip(), v2.PILToTensor()])
FEW = [5, 1, 9, 12, 3, 3, 8]
DATASETS: dict[str, Callable[[Path], Any]] = {
    "subset": lambda folder: Subset(Subset(Pictures(folder, V1), range(1, 15)), FEW),
    "concatenated": lambda folder: ConcatDataset([Pictures(folder, V1), Subset(Pictures(folder, V2), FEW)]),
    "image folder": lambda folder: datasets.ImageFolder(str(folder), V1, target_transform=float),
    "cifar": lambda folder: Cifar(transform=CLOSED, target_transform=float),
    "pair of transforms": lambda folder: Segmented(transform=CLOSED, target_transform=v1.PILToTensor()),
    "joint transform": lambda folder: Segmented(transforms=JOINT),
    "reassigned": lambda folder: reassigned(CLOSED),
    "two views": lambda folder: Views(folder, V1),
    "dicts": lambda folder: Keyed(folder, V1),
    "open file": lambda folder: InBlock(folder, V1),
    "named arguments": lambda folder: Named(folder, Noting()),
    "wrapped": lambda folder: Wrapping(Subset(Pictures(folder), FEW), V1),
}


@pytest.mark.parametrize("build", DATASETS.values(), ids=DATASETS.keys())
def test_samples_of_any_dataset_are_the_same(build: Callable[[Path], Any], folder: Path) -> None:
    replaced = check_same(lambda: DataLoader(build(folder), 3, shuffle=True))
    assert isinstance(replaced.dataset, SampleDataset)


class MixedBatch:
    """Mixes pictures of a batch, with a generator of its own."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(2)

    def __call__(self, samples: list[Any]) -> Any:
        images, labels = default_collate(samples)
        return images.lerp(images.flip(0), self.numbers.random()), labels


def mixup(samples: list[Any]) -> Any:
    return v2.RandomChoice([v2.MixUp(num_classes=20)])(*default_collate(samples))


@pytest.mark.parametrize("collate", [lambda: mixup, MixedBatch], ids=["mixup", "own generator"])
def test_a_random_collate_function_is_applied_to_each_batch(collate: Callable[[], Any], folder: Path) -> None:
    fixed = v1.Compose([v1.Resize((12, 12)), *CLOSE])
    for dataset in (Pictures(folder, V1), Pictures(folder, fixed), [(torch.ones(3, 4, 4), n) for n in range(20)]):
        check_same(lambda dataset=dataset: DataLoader(dataset, 4, shuffle=True, collate_fn=collate()))
