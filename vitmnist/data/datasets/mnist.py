"""MNIST and the sets in its format."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, dataset_in_memory, stamps
from vitmnist.data.datasets.downloading import download
from vitmnist.data.datasets.idx import read_idx
from vitmnist.errors import DataError

BUNDLED_MNIST = Path(__file__).parent.parent / "mnist"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BUNDLED_SHA256 = (  # of the packed files
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
DIGITS = tuple("0123456789")
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


@DATASETS.register("mnist", SizeOptions)
def mnist(sizes: SizeOptions, root: Path) -> Dataset:
    """MNIST (LeCun, Cortes, Burges), from the four official files, which this package contains."""
    files = tuple(BUNDLED_MNIST / f"{name}.gz" for name in FILES)
    return _read("mnist", files, stamps(files), BUNDLED_SHA256, DIGITS, sizes)


@DATASETS.register("fashion_mnist", SizeOptions)
def fashion_mnist(sizes: SizeOptions, root: Path) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747), from `root` or by torchvision's downloader."""
    from torchvision.datasets import FashionMNIST  # takes 2 s, and only its downloader is used

    return _from_torchvision("fashion_mnist", FashionMNIST, root, GARMENTS, sizes)


@DATASETS.register("kmnist", SizeOptions)
def kmnist(sizes: SizeOptions, root: Path) -> Dataset:
    """Kuzushiji-MNIST (Clanuwat et al., arXiv:1812.01718), from `root` or by torchvision's downloader."""
    from torchvision.datasets import KMNIST

    return _from_torchvision("kmnist", KMNIST, root, HIRAGANA, sizes)


def _from_torchvision(name: str, source: Any, root: Path, classes: tuple[str, ...], sizes: SizeOptions) -> Dataset:
    """A torchvision data set class, downloaded only if no folder has the four files."""
    raw = root / source.__name__ / "raw"
    files = _find_files(root, raw)
    if not files:
        packed = [f"{name}.gz" for name in FILES]
        download(source.__name__, root, lambda: source(str(root), download=True), packed, raw)
        files = tuple(raw / name for name in packed)
    return _read(name, files, stamps(files), (None,) * len(FILES), classes, sizes)


def _find_files(root: Path, raw: Path) -> tuple[Path, ...] | None:
    """The files in the first of torchvision's layouts with all four; prefers a `.gz`, which has a checksum."""
    for folder in (raw, raw.parent, root / "raw", root):
        packed = (folder / f"{name}.gz" for name in FILES)
        files = tuple(path if path.is_file() else path.with_suffix("") for path in packed)
        if all(path.is_file() for path in files):
            return files
    return None


@lru_cache(maxsize=1)  # the jobs of a sweep share one set; keeping more would cost memory
def _read(
    name: str,
    files: tuple[Path, ...],
    stamps: object,
    checksums: tuple[str | None, ...],
    classes: tuple[str, ...],
    sizes: SizeOptions,
) -> Dataset:
    """Read the four files, again only if they have changed (`stamps`)."""
    train_images, train_labels, test_images, test_labels = map(read_idx, files, checksums)
    _check_pair(files[0], train_images, train_labels, len(classes))
    _check_pair(files[2], test_images, test_labels, len(classes))
    if train_images.shape[1:] != test_images.shape[1:]:
        found = f"{_size(train_images)} and {_size(test_images)}"
        raise DataError(f"{files[0]} and {files[2]} differ in their images: {found}")
    train, test = (train_images.unsqueeze(1), train_labels.long()), (test_images.unsqueeze(1), test_labels.long())
    return dataset_in_memory(name, train, test, classes, sizes)


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
