"""The data sets: uint8 images, labels and channel statistics, read from verified files."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor

from vitmnist.config import bounded
from vitmnist.data.idx import IdxFile
from vitmnist.errors import ConfigError, DataError
from vitmnist.registry import Registry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """One part of a data set.

    Args:
        images: uint8 `[N, C, H, W]`.
        labels: int64 `[N]`.
        mean: per channel, of the training images scaled to 0…1.
        std: per channel, likewise; population standard deviation.
        classes: the name of each label.
        images_file: the file the images came from, for a loader that reads from disk; image i stands i-th in it.
    """

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    images_file: IdxFile

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A training and a test split of the same classes and image shape."""

    name: str
    train: Split
    test: Split

    def sha256(self) -> dict[str, str]:
        """A checksum for each array: what a run was really trained on."""
        arrays = {
            "train_images": self.train.images,
            "train_labels": self.train.labels,
            "test_images": self.test.images,
            "test_labels": self.test.labels,
        }
        return {name: hashlib.sha256(array.numpy().data).hexdigest() for name, array in arrays.items()}


DATASETS: Registry[Dataset] = Registry("data/dataset")


@dataclass
class Sizes:
    """How much of a set is used: the first `train_size` and `test_size` images; None is all."""

    train_size: int | None = bounded(None, at_least=1)
    test_size: int | None = bounded(None, at_least=1)


FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BUNDLED_MNIST = Path(__file__).parent / "mnist"
BUNDLED_SHA256 = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
UNPACKED = "vitmnist-unpacked"  # a folder of our own: what stands elsewhere in data.root is never written to
DIGITS = tuple("0123456789")
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


def load_dataset(values: Mapping[str, Any], root: str) -> Dataset:
    """The data set that `values["name"]` chooses.

    Args:
        values: `name`, `train_size`, `test_size`, as in `conf/data/dataset/`.
        root: the folder for what is downloaded or unpacked; `~` is the home folder.

    Raises:
        ConfigError: an unknown name or a size that the set does not have.
        DataError: a file that is missing or damaged.
    """
    try:
        return DATASETS.build(values, Path(root).expanduser())
    except OSError as error:
        raise DataError(f"data.root={root}: {error.filename or ''}: {error.strerror}") from error


@DATASETS.register("mnist", Sizes)
def mnist(sizes: Sizes, root: Path) -> Dataset:
    """MNIST (LeCun, Cortes, Burges), from the four official files that this package carries."""
    files = [
        IdxFile(BUNDLED_MNIST / f"{name}.gz", f"sha256:{sha256}", root / UNPACKED / "mnist" / name)
        for name, sha256 in zip(FILES, BUNDLED_SHA256, strict=True)
    ]
    return _from_idx("mnist", files, DIGITS, sizes)


@DATASETS.register("fashion_mnist", Sizes)
def fashion_mnist(sizes: Sizes, root: Path) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747), from `root` or by torchvision's downloader."""
    from torchvision.datasets import FashionMNIST

    return _from_idx("fashion_mnist", _torchvision_files(FashionMNIST, root), GARMENTS, sizes)


@DATASETS.register("kmnist", Sizes)
def kmnist(sizes: Sizes, root: Path) -> Dataset:
    """Kuzushiji-MNIST (Clanuwat et al., arXiv:1812.01718), from `root` or by torchvision's downloader."""
    from torchvision.datasets import KMNIST

    return _from_idx("kmnist", _torchvision_files(KMNIST, root), HIRAGANA, sizes)


def _torchvision_files(source: Any, root: Path) -> list[IdxFile]:
    """The four files of a torchvision data set class, downloaded only where no folder holds them."""
    raw = root / source.__name__ / "raw"
    found = _find_files(source, root)
    if found is None:
        log.info("downloading %s into %s", source.__name__, raw)
        try:
            source(str(root), download=True)
            reason = "the download left files out"
        except (RuntimeError, URLError, OSError) as error:
            reason = " ".join(str(error).split())
            with contextlib.suppress(OSError):  # the downloader leaves its empty folders behind
                raw.rmdir()
                raw.parent.rmdir()
        found = _find_files(source, root)
        if found is None:
            raise DataError(
                f"{source.__name__} is not in {root} and could not be downloaded ({reason[:200]}).\n"
                f"Put {', '.join(f'{name}.gz' for name in FILES)} into {raw}, "
                "or name their folder with data.root=FOLDER"
            )
    return found


def _find_files(source: Any, root: Path) -> list[IdxFile] | None:
    """The files in the first of torchvision's layouts that holds all four; a `.gz` can be verified and comes first."""
    md5 = {Path(name).stem: checksum for name, checksum in source.resources}
    raw = root / source.__name__ / "raw"
    for folder in (raw, raw.parent, root / "raw", root):
        files = []
        for name in FILES:
            if (folder / f"{name}.gz").is_file():
                unpacked = root / UNPACKED / source.__name__ / name
                files.append(IdxFile(folder / f"{name}.gz", f"md5:{md5[name]}", unpacked))
            elif (folder / name).is_file():
                files.append(IdxFile(folder / name, None, folder / name))
        if len(files) == len(FILES):
            unverified = "" if all(file.checksum for file in files) else "; unpacked files have no known checksum"
            log.info("%s from %s%s", source.__name__, folder, unverified)
            return files
    return None


def _from_idx(name: str, files: list[IdxFile], classes: tuple[str, ...], sizes: Sizes) -> Dataset:
    train_file, _, test_file, _ = files
    train_images, train_labels, test_images, test_labels = (file.read() for file in files)
    _check_pair(train_file.path, train_images, train_labels, len(classes))
    _check_pair(test_file.path, test_images, test_labels, len(classes))
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{train_file.path} and {test_file.path} differ in their images: "
            f"{_size(train_images)} and {_size(test_images)}"
        )
    take_train = _first("train_size", sizes.train_size, len(train_images))
    take_test = _first("test_size", sizes.test_size, len(test_images))
    images = train_images[take_train].unsqueeze(1)
    mean, std = channel_statistics(images)

    def split(images: Tensor, labels: Tensor, file: IdxFile) -> Split:
        return Split(images, labels.long(), mean, std, classes, file)

    return Dataset(
        name,
        train=split(images, train_labels[take_train], train_file),
        test=split(test_images[take_test].unsqueeze(1), test_labels[take_test], test_file),
    )


def _check_pair(path: Path, images: Tensor, labels: Tensor, classes: int) -> None:
    if images.dim() != 3 or labels.dim() != 1:
        raise DataError(
            f"{path}: expected images [N, H, W] and labels [N], found {images.dim()} and {labels.dim()} dimensions"
        )
    if len(images) != len(labels) or not images.numel():
        raise DataError(f"{path}: holds {len(images)} images of {_size(images)} for {len(labels)} labels")
    if int(labels.max()) >= classes:
        raise DataError(f"{path}: has a label {int(labels.max())}; the set has {classes} classes, from 0")


def _size(images: Tensor) -> str:
    return "×".join(map(str, images.shape[1:]))


def _first(key: str, size: int | None, available: int) -> slice:
    if size is not None and size > available:
        raise ConfigError(f"data.dataset.{key}={size}: the set has {available} images; null takes them all")
    return slice(size)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel of uint8 `[N, C, H, W]`, scaled to 0…1.

    Exact up to the last root and division: the sums are of integers, in pieces that stay small in memory.
    """
    pixels = images.numel() // images.shape[1]
    total = torch.zeros(images.shape[1], dtype=torch.int64)
    squares = torch.zeros_like(total)
    for piece in images.split(1000):
        wide = piece.to(torch.int32)
        total += wide.sum(dim=(0, 2, 3))
        squares += wide.square_().sum(dim=(0, 2, 3))
    mean, std = [], []
    for first, second in zip(total.tolist(), squares.tolist(), strict=True):
        mean.append(first / (255 * pixels))
        deviation = math.sqrt(second * pixels - first * first) / pixels
        # A constant channel carries nothing; one step of a byte in place of zero keeps it finite.
        std.append((deviation or 1.0) / 255)
    return tuple(mean), tuple(std)
