"""Random samples that cannot be split, read or kept are refused, and the message says which and why."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1

from tests.support.pictures import Pictures, assert_same, run, write_pictures
from vitmnist import from_dataloader
from vitmnist.errors import ConfigError, DataError

FLIP = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Counting:
    """Keeps a state from one sample to the next."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, image: Any) -> Any:
        self.seen += 1
        return image.rotate(self.seen)


class Smoothed:
    """Mixes each picture with those before it."""

    mean: Any = 0.0

    def __call__(self, image: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * image.mean()
        return image - self.mean


class Numbered(Pictures):
    """Its transform reads the index."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.open(index), index), index


class Started(Pictures):
    """Its transform has an argument by name after others, as in MONAI's `CacheDataset`."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.open(index), index=index), index


class Inspected(Pictures):
    """Looks into what its transform has made."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.open(index)).mean(), index


class RandomTarget(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.open(index)), random.randrange(10)


def with_index(image: Any, index: int) -> Any:
    return v1.functional.to_tensor(image.resize((8, 8))) * random.random() * index


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "counting": (lambda folder: Pictures(folder, v1.Compose([Counting(), FLIP])), "keep no state between samples"),
    "smoothed": (lambda folder: Pictures(folder, v1.Compose([FLIP, Smoothed()])), "keep no state between samples"),
    "index": (lambda folder: Numbered(folder, with_index), "with_index .* not return as many results; name the"),
    "start": (lambda folder: Started(folder, with_index), "arguments with and without names\\); name the two steps"),
    "inspected": (lambda folder: Inspected(folder, FLIP), "what that returns .*no attribute 'mean'\\); name the two"),
    "random target": (lambda folder: RandomTarget(folder, FLIP), "sample 0 is random .*Python.* apart from the tr"),
    "inner": (lambda folder: Pictures(folder, v1.Compose([v1.RandomCrop(99), FLIP])), "0: RandomCrop raised Val"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_samples_that_cannot_be_split_are_refused(build: Callable[[Path], Any], message: str, folder: Path) -> None:
    dataloader = DataLoader(build(folder), 4, collate_fn=list)
    with pytest.raises((ConfigError, DataError), match=f"^ram: .*{message}"):
        from_dataloader(dataloader, "ram")
    with pytest.warns(UserWarning, match="^from_dataloader returns the DataLoader as it is, undecoded: ram: "):
        assert from_dataloader(dataloader) is dataloader


@pytest.mark.parametrize(("damaged", "workers"), [(0, 0), (7, 2)])
def test_a_picture_that_cannot_be_read_is_named(damaged: int, workers: int, tmp_path: Path) -> None:
    dataset = Pictures(write_pictures(tmp_path), FLIP)
    path = dataset.paths[damaged]
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-60]), path.unlink):
        damage()
        with pytest.raises(DataError, match=rf"^ram: sample {damaged}: (open|load) raised \w+Error: "):
            from_dataloader(DataLoader(dataset, 4, num_workers=workers), "ram")
    assert list(from_dataloader(DataLoader(Subset(dataset, [1, 2, 3]), 3), "ram"))


def test_attributes_of_transforms_that_are_still_applied_may_change(folder: Path) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Pictures(folder, deepcopy(FLIP)), 9)

    for form in ("exact", "tensor"):
        original, replaced = build(), from_dataloader(build(), "ram", transforms=form)
        for loader in (original, replaced):
            assert list(loader)
            loader.dataset.transform.transforms[1].p = 1.0
        assert_same(run(replaced), run(original))

    changes: list[tuple[Callable[[Any], object], str]] = [
        (lambda dataset: setattr(dataset, "transform", v1.ToTensor()), "ToTensor"),
        (lambda dataset: dataset.transform.transforms.append(FLIP), "Resize"),
    ]
    for change, name in changes:
        replaced = from_dataloader(build(), "ram")
        assert list(replaced)
        change(replaced.dataset)
        with pytest.raises(ConfigError, match=f"^{name} has changed since the samples were decoded"):
            list(replaced)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": "tensors"}, r"^transforms=tensors: did you mean 'tensor'\? allowed: exact, tensor"),
        ({"loader": "gpu_slice"}, r"^gpu_slice: sample 0 is random .*; use ram"),
        ({"decode": len}, r"^decode= and transform= are the two steps of a sample; give both"),
        ({"decode": len, "transform": len, "transforms": "tensor"}, r"is for transforms of the dataset; leave dec"),
        ({"decode": lambda index: index, "transform": str}, r"^ram: .*of them: decode= and transform= do not fit$"),
        ({"decode": lambda index: 1 // 0, "transform": str}, r"^ram: sample 0: <lambda> raised ZeroDivisionError"),
        ({"decode": lambda index: random.random(), "transform": str}, r"^ram: sample 0 is random .* apart from .*"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_named(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        from_dataloader(DataLoader(Pictures(folder, FLIP), 4), **{"loader": "ram", **options})
