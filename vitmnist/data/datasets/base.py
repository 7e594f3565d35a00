"""What a data set is: two splits of images and labels, and how to find a picture of them on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Protocol

import torch
from PIL import Image

from vitmnist.config.validation import bounded
from vitmnist.data.tensors import TensorSet, channel_statistics, digest
from vitmnist.errors import ConfigError, DataError
from vitmnist.registry import Registry

EVAL_FILES = "eval_files.txt"  # in a run's folder: the files that it was evaluated on, in the order of the split


class ImageReader(Protocol):
    """The pictures of a split on disk, one by one; can be sent to another process."""

    def __getitem__(self, index: int) -> Image.Image: ...


@dataclass(frozen=True)
class Split(TensorSet):
    """One part of a data set.

    Args:
        images: uint8 `[N, C, H, W]`.
        labels: int64 `[N]`.
        mean: per channel, of the images that are trained on, scaled to 0…1.
        std: per channel, likewise; population standard deviation.
        classes: the name of each label.
        pictures: opens the pictures on disk, for a loader that reads them one by one; picture i is `images[i]`.
        sha256: checksum of `images`, where it is known already.
        files: the file of each image, relative to the folder of the data set; None where images have no files.

    Raises:
        DataError: another dtype or shape than these, or a label that is no class.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    _: KW_ONLY
    pictures: Callable[[], ImageReader] | None = None
    sha256: str | None = None
    files: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, array, dtype, dim in (
            ("images", self.images, torch.uint8, 4),
            ("labels", self.labels, torch.int64, 1),
        ):
            if array.dtype != dtype or array.dim() != dim:
                raise DataError(
                    f"{name}: must be {dtype} with {dim} dimension{'s' if dim > 1 else ''}, "
                    f"found {array.dtype} {list(array.shape)}"
                )
        outside = (self.labels < 0) | (self.labels >= len(self.classes))
        if outside.any():
            index = int(outside.nonzero()[0])
            raise DataError(
                f"labels: must be 0 to {len(self.classes) - 1}, for {len(self.classes)} classes; "
                f"label {index} is {int(self.labels[index])}"
            )

    def part(self, span: slice) -> Split:
        """The images of a span, as views."""
        start, stop, _ = span.indices(len(self))
        whole = (start, stop) == (0, len(self))
        return replace(
            self,
            images=self.images[span],
            labels=self.labels[span],
            pictures=partial(OffsetImageReader, self.pictures, start) if self.pictures and start else self.pictures,
            sha256=self.sha256 if whole else None,
            files=self.files[span] if self.files else None,
        )

    def name(self, index: int) -> str | int:
        """The file of an image, or its index where it has none."""
        return self.files[index] if self.files else index


class OffsetImageReader:
    """The pictures from `start` on; can be sent to another process."""

    def __init__(self, opens: Callable[[], ImageReader], start: int) -> None:
        self._pictures, self._start = opens(), start

    def __getitem__(self, index: int) -> Image.Image:
        return self._pictures[self._start + index]


@dataclass(frozen=True)
class Dataset:
    """A training and a test split of the same classes and image shape.

    `skipped` counts pictures that could not be read and were left out because the user allowed it. `eval_split` says
    what `test` is: "test", or "held-out" of the training images.
    """

    name: str
    train: Split
    test: Split
    skipped: int = 0
    eval_split: str = "test"

    def evaluated_on(self) -> str:
        """The split that a model is evaluated on, for people."""
        return f"{self.eval_split} split, {len(self.test):,} images"

    def sha256(self) -> dict[str, str]:
        """A checksum for each array: what a run was really trained on."""
        return {
            "train_images": self.train.sha256 or digest(self.train.images),
            "train_labels": digest(self.train.labels),
            "test_images": self.test.sha256 or digest(self.test.images),
            "test_labels": digest(self.test.labels),
        }

    def held_out(self, size: int) -> Dataset:
        """The last `size` training images in place of the test split, to judge by; the others to train on.

        The channel statistics become those of the images to train on.

        Raises:
            ConfigError: nothing would be left to train on.
        """
        left = len(self.train) - size
        if left < 1:
            raise ConfigError(f"data.holdout={size}: the set has {len(self.train)} training images; leave some of them")
        train, test = self.train.part(slice(left)), self.train.part(slice(left, None))
        mean, std = channel_statistics(train.images)
        return replace(
            self,
            train=replace(train, mean=mean, std=std),
            test=replace(test, mean=mean, std=std),
            eval_split="held-out",
        )


DATASETS: Registry[Dataset] = Registry("data/dataset")
"""Options that determine the shape of the images have it as `shape`, `[C, H, W]`; a model that does not fit is then
refused before anything is read."""


@dataclass
class Sizes:
    """How much of a set is used: the first `train_size` and `test_size` images; None is all."""

    train_size: int | None = bounded(None, at_least=1)
    test_size: int | None = bounded(None, at_least=1)


def first(key: str, size: int | None, available: int) -> slice:
    """The slice that takes the first `size` of a split's images, all if it is None.

    Raises:
        ConfigError: there are not as many; names `data.dataset.KEY`.
    """
    if size is not None and size > available:
        raise ConfigError(f"data.dataset.{key}={size}: the set has {available} images; null takes them all")
    return slice(size)
