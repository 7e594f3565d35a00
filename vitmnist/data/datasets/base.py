"""Datasets of labelled images, their splits, and the registry that loads them by name.

To add a dataset, write a module in this folder with a function that returns a `Dataset`, register the function, and
write its YAML file in `conf/data/dataset/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from PIL import Image
from torch import Tensor

from vitmnist.config.validation import config_field
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.images import ColorMode, ImageReader, Pixels, ReadImage
from vitmnist.data.sources import TensorSet, hash_tensor
from vitmnist.errors import ConfigError, DataError, classify_error
from vitmnist.registry import ConfigGroup


@dataclass(frozen=True)
class ImageFiles:
    """Image files by their indices.

    Args:
        names: the paths of the files, relative to `folder`.
        read: reads a file. It is called from several threads, and must be picklable for workers.
    """

    folder: Path
    names: Sequence[str]
    read: ReadImage

    def __getitem__(self, index: int) -> Pixels | Image.Image:
        return self.read(self.folder / self.names[index])


@dataclass(frozen=True)
class Split(TensorSet):
    """One part of a dataset.

    Args:
        images: uint8 `[N, C, H, W]`.
        labels: int64 `[N]`.
        mean: the mean of each channel of the training images, scaled to 0…1.
        std: the population standard deviation of each channel of the training images, scaled to 0…1.
        classes: the name of each label.
        files: the file of each image, from which `disk` reads it; None if the images have no files.
        sha256: the `hash_tensor` of `images`, if already known.

    Raises:
        DataError: images or labels have another dtype or shape, or a label has no class.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    _: KW_ONLY
    files: ImageFiles | None = None
    sha256: str | None = None

    def __repr__(self) -> str:
        return f"Split({len(self):,} images {list(self.images.shape[1:])}, {len(self.classes)} classes)"

    def __post_init__(self) -> None:
        super().__post_init__()
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(f"images: must be uint8 [N, C, H, W], found {images.dtype} {list(images.shape)}")
        if labels.dtype != torch.int64 or labels.dim() != 1:
            raise DataError(
                f"labels: must be int64 [N], one per image, found {labels.dtype} {list(labels.shape)}; pass "
                "labels.argmax(1) if they are one-hot; for several labels or masks keep your own training loop, with "
                "vitmnist.from_dataloader or make_loader, which deliver labels of any shape"
            )
        lowest, highest = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if lowest < 0 or highest >= len(self.classes):
            raise DataError(f"labels: must be 0 to {len(self.classes) - 1}, found {lowest} to {highest}")

    def subset(self, rows: slice | Tensor) -> Split:
        indices = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        if indices == range(len(self)):
            return self
        files = self.files and replace(self.files, names=[self.files.names[index] for index in indices])
        return replace(super().subset(rows), files=files, sha256=None)

    def sample_name(self, index: int) -> str | int:
        """Return the file of an image, or its index if it has none."""
        return self.files.names[index] if self.files else index


@dataclass(frozen=True)
class Dataset:
    """Splits of the same classes and image shape; epochs are evaluated on `validation` if there is one, else on `test`.

    A dataset with neither can be evaluated, but training needs a hold-out.

    Args:
        skipped: number of unreadable images that were left out with the user's permission.
        division: with a hold-out or folds, its size or their number, and the checksums of the splits before the
            division. It is the same for all folds, so reports group them by it.
        folds: the fold of each training image by its `sample_name`, for `data.fold`; others are always for training.

    Raises:
        DataError: there are no training images, or images of different shapes.
    """

    name: str
    train: Split
    test: Split | None = None
    skipped: int = 0
    _: KW_ONLY
    validation: Split | None = None
    division: dict[str, Any] | None = None
    folds: Mapping[Any, int] | None = None

    def __repr__(self) -> str:
        sizes = " and ".join(f"{len(split):,} {name}" for name, split in self.splits.items())
        shape, classes = [*self.train.images.shape[1:]], len(self.train.classes)
        return f"Dataset({self.name:.24}: {sizes} images {shape}, {classes} classes)"

    def __post_init__(self) -> None:
        if not len(self.train):
            raise DataError(f"{self.name}: there are no training images")
        if len({tuple(split.images.shape[1:]) for split in self.splits.values()}) > 1:
            shapes = ", ".join(f"{name} images {list(split.images.shape[1:])}" for name, split in self.splits.items())
            raise DataError(f"{self.name}: {shapes}; all must have the same shape")

    @property
    def splits(self) -> dict[str, Split]:
        """The existing splits by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def eval_split_name(self) -> str:
        """The name of the split on which epochs are evaluated."""
        return next(name for name in ("validation", "test", "train") if name in self.splits)

    @property
    def eval_split(self) -> Split:
        return self.splits[self.eval_split_name]

    def with_statistics(self, mean: Sequence[float], std: Sequence[float]) -> Dataset:
        """Return a copy of the dataset with these channel statistics in every split."""
        statistics: dict[str, Any] = {"mean": tuple(mean), "std": tuple(std)}
        splits: dict[str, Any] = {name: replace(split, **statistics) for name, split in self.splits.items()}
        return replace(self, **splits)

    def draw_subset(self, size: int) -> Dataset:
        """Return a copy with at most `size` images in each split, drawn at random but always the same ones."""
        splits: dict[str, Any] = {}
        for name, split in self.splits.items():
            rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size]
            splits[name] = split.subset(rows.sort().values)
        return replace(self, **splits)

    @cached_property
    def sha256(self) -> dict[str, str]:
        """A checksum of each tensor. Runs on the same data have the same checksums."""
        checksums: dict[str, str] = {}
        for name, split in self.splits.items():
            checksums[f"{name}_images"] = split.sha256 or hash_tensor(split.images)
            checksums[f"{name}_labels"] = hash_tensor(split.labels)
        return checksums


@dataclass
class DatasetOptions:
    """Base class of the options of a dataset. A subclass overrides what they determine."""

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """`[C, H, W]` of the images: an unsuitable model is refused before anything is read. None: not known yet."""
        return None

    @property
    def reader(self) -> ReadImage | None:
        """Reads a file for `predict` as the dataset reads its files. None: images are stretched to the shape."""
        return None

    def resolve_auto(self) -> dict[str, Any]:
        """Return the values, by key, that replace `auto`; the run records them."""
        return {}


DATASETS = ConfigGroup[DatasetOptions, [Path], Dataset]("data/dataset", __package__, DatasetOptions)


@dataclass
class SizeOptions(DatasetOptions):
    """Limits the splits to their first `train_size` and `test_size` images; None uses all."""

    train_size: int | None = config_field(None, at_least=1, image_selection="train")
    test_size: int | None = config_field(None, at_least=1, image_selection="test")

    def select_rows(self, num_images: Mapping[str, int]) -> dict[str, slice]:
        """Return the rows to use of each split, from its number of images; raises `ConfigError` if it is too small."""
        sizes = {"train": self.train_size, "test": self.test_size}
        for split, size in sizes.items():
            if size is not None and size > (available := num_images.get(split, 0)):
                raise ConfigError(f"data.dataset.{split}_size={size}: the split has {available} images; null uses all")
        return {split: slice(sizes.get(split)) for split in num_images}


def make_dataset(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor] | None,
    classes: tuple[str, ...],
    sizes: SizeOptions,
    validation: tuple[Tensor, Tensor] | None = None,
    is_mapped: bool = False,
) -> Dataset:
    """Make a dataset of images uint8 `[N, C, H, W]`, perhaps memory-mapped, and labels int64 `[N]`, cut to `sizes`."""
    pairs = {"train": train, "validation": validation, "test": test}
    rows = sizes.select_rows({split: len(pair[0]) for split, pair in pairs.items() if pair})
    mean, std = compute_statistics(train[0][rows["train"]])
    splits: dict[str, Any] = {
        split: Split(*pair, mean, std, classes, is_mapped=is_mapped).subset(rows[split])
        for split, pair in pairs.items()
        if pair
    }
    return Dataset(name, **splits)


def get_image_reader(values: Mapping[str, Any], shape: Sequence[int]) -> ReadImage:
    """Return the `reader` of a dataset's options, or a reader that stretches images; raises `ConfigError` if unknown.

    Args:
        values: the name and the options of the dataset. Options that are allowed to change can be missing.
        shape: the `[C, H, W]` of the dataset's images.
    """
    complete = {key: "" if value == MISSING else value for key, value in DATASETS.with_defaults(values).items()}
    _, options = DATASETS.resolve(complete)
    channels, height, width = shape
    return options.reader or ImageReader((height, width), ColorMode.grey if channels == 1 else ColorMode.rgb)


def load_dataset(name: str, *, root: str = "~/.cache/vitmnist", **options: object) -> Dataset:
    """Load a dataset: its splits of uint8 images, labels and channel statistics.

    Args:
        name: mnist, fashion_mnist, kmnist, cifar10, cifar100, image_folder, arrays, hugging_face, or your own.
        root: the folder for downloaded and decoded files; `~` is the home folder.
        options: the keys of the dataset's YAML file in `conf/data/dataset/`, such as `train_size=1000`.

    Raises:
        ConfigError: the name or an option is unknown, or a size is larger than its split.
        DataError: a file is missing or damaged.
    """
    return build_dataset({"name": name, **options}, root, key="")


def build_dataset(values: Mapping[str, Any], root: str, key: str | None = None) -> Dataset:
    """Build the dataset `values["name"]`, with the key `key` in the configuration; raises `load_dataset`'s errors."""
    builder, options = DATASETS.resolve(values, key, complete=True)
    try:
        return builder(options, Path(root).expanduser())
    except OSError as error:
        raise DataError(f"data/dataset={values['name']}: {classify_error(error).message}") from error
