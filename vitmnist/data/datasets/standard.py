"""The bundled MNIST, and what torchvision downloads: Fashion-MNIST, Kuzushiji-MNIST, CIFAR-10 and CIFAR-100."""

import gzip
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor

from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, make_dataset
from vitmnist.errors import DataError

BUNDLED_MNIST = Path(__file__).parent.parent / "mnist"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""The files of a dataset in MNIST's format."""
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


@DATASETS.register("mnist", SizeOptions)
def mnist(sizes: SizeOptions, root: Path) -> Dataset:
    """MNIST (LeCun, Cortes, Burges), from the four official files in this package."""
    return _read_idx_files("mnist", [BUNDLED_MNIST / f"{name}.gz" for name in FILES], tuple("0123456789"), sizes)


def _load_idx_dataset(name: str, source: str, classes: tuple[str, ...], sizes: SizeOptions, root: Path) -> Dataset:
    """Load the dataset of a torchvision class; download or unpack only if one of its four files is missing."""
    raw = root / source / "raw"
    files = [raw / file for file in FILES]
    if not all(path.is_file() for path in files):
        from torchvision import datasets  # This import takes 2 s.

        _download(getattr(datasets, source), root, [f"{file}.gz" for file in FILES], raw)
    return _read_idx_files(name, files, classes, sizes)


def _read_idx_files(name: str, files: Sequence[Path], classes: tuple[str, ...], sizes: SizeOptions) -> Dataset:
    train_images, train_labels, test_images, test_labels = map(read_idx, files)
    train, test = (train_images.unsqueeze(1), train_labels.long()), (test_images.unsqueeze(1), test_labels.long())
    return make_dataset(name, train, test, classes, sizes)


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes (http://yann.lecun.com/exdb/mnist), compressed (`.gz`) or not; raises `DataError`."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        (dimensions,) = struct.unpack_from(">3xB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        # Copy it, because `bytes` are read-only.
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is damaged or no IDX file of bytes: {error}") from error


def _load_cifar(classes: int, sizes: SizeOptions, root: Path) -> Dataset:
    """Load CIFAR-10 or CIFAR-100 with torchvision; it compares the files with their published MD5."""
    from torchvision import datasets

    source = getattr(datasets, f"CIFAR{classes}")
    train = _download(source, root, [f"cifar-{classes}-python.tar.gz"], root)
    train_pair, test_pair = (
        (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in (train, source(str(root), train=False))
    )
    return make_dataset(f"cifar{classes}", train_pair, test_pair, tuple(train.classes), sizes)


def _download(source: Callable[..., Any], root: Path, files: list[str], folder: Path) -> Any:
    """Return the dataset of a torchvision class, downloaded if it is not in `root`; raises `DataError`."""
    try:
        return source(str(root), download=True)
    except (RuntimeError, URLError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source.__name__} is not in {root} as it was published, and could not be downloaded ({reason[:200]}).\n"
            f"Put {', '.join(files)} into {folder}, or set data.root to a folder that has them"
        ) from error


# Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747) and Kuzushiji-MNIST (Clanuwat et al., arXiv:1812.01718)
for name, source, classes in (("fashion_mnist", "FashionMNIST", GARMENTS), ("kmnist", "KMNIST", HIRAGANA)):
    DATASETS.register(name, SizeOptions)(partial(_load_idx_dataset, name, source, classes))
# CIFAR-10, and CIFAR-100 with its 100 fine labels (Krizhevsky, 2009)
for count in (10, 100):
    DATASETS.register(f"cifar{count}", SizeOptions)(partial(_load_cifar, count))
