"""MNIST and the sets in its format, read from verified IDX files."""

from __future__ import annotations

import contextlib
import logging
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split
from vitmnist.data.datasets.downloading import find_or_download
from vitmnist.data.datasets.idx import IdxFile, IdxImageReader
from vitmnist.data.tensors import channel_statistics
from vitmnist.errors import DataError

log = logging.getLogger(__name__)


FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BUNDLED_MNIST = Path(__file__).parent.parent / "mnist"
BUNDLED_SHA256 = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
CONTENT_SHA256 = {  # of the unpacked files, in the order of FILES; for archives that were compressed again
    "MNIST": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "FashionMNIST": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}
UNPACKED = "vitmnist-unpacked"  # below data.root; nothing else there is ever written to
DIGITS = tuple("0123456789")
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


@DATASETS.register("mnist", SizeOptions)
def mnist(sizes: SizeOptions, root: Path) -> Dataset:
    """MNIST (LeCun, Cortes, Burges), from the four official files, which this package contains."""
    files = [
        IdxFile(BUNDLED_MNIST / f"{name}.gz", f"sha256:{sha256}", root / UNPACKED / "mnist" / name, content)
        for name, sha256, content in zip(FILES, BUNDLED_SHA256, CONTENT_SHA256["MNIST"], strict=True)
    ]
    return _from_idx("mnist", files, DIGITS, sizes)


@DATASETS.register("fashion_mnist", SizeOptions)
def fashion_mnist(sizes: SizeOptions, root: Path) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747), from `root` or by torchvision's downloader."""
    from torchvision.datasets import FashionMNIST  # takes 2 s, and only its downloader is used

    return _from_idx("fashion_mnist", _torchvision_files(FashionMNIST, root), GARMENTS, sizes)


@DATASETS.register("kmnist", SizeOptions)
def kmnist(sizes: SizeOptions, root: Path) -> Dataset:
    """Kuzushiji-MNIST (Clanuwat et al., arXiv:1812.01718), from `root` or by torchvision's downloader."""
    from torchvision.datasets import KMNIST

    return _from_idx("kmnist", _torchvision_files(KMNIST, root), HIRAGANA, sizes)


def _torchvision_files(source: Any, root: Path) -> list[IdxFile]:
    """The four files of a torchvision data set class, downloaded only if no folder has them."""
    raw = root / source.__name__ / "raw"

    def fetch() -> None:
        try:
            source(str(root), download=True)
        finally:
            with contextlib.suppress(OSError):  # the downloader leaves its empty folders behind
                raw.rmdir()
                raw.parent.rmdir()

    packed = [f"{name}.gz" for name in FILES]
    return find_or_download(source.__name__, root, partial(_find_files, source, root), fetch, packed, raw)


def _find_files(source: Any, root: Path) -> list[IdxFile] | None:
    """The files in the first of torchvision's layouts with all four; prefers a `.gz`, because it can be verified."""
    md5 = {Path(name).stem: checksum for name, checksum in source.resources}
    contents = CONTENT_SHA256.get(source.__name__, (None,) * len(FILES))
    raw = root / source.__name__ / "raw"
    for folder in (raw, raw.parent, root / "raw", root):
        files = []
        for name, content in zip(FILES, contents, strict=True):
            if (folder / f"{name}.gz").is_file():
                unpacked = root / UNPACKED / source.__name__ / name
                files.append(IdxFile(folder / f"{name}.gz", f"md5:{md5[name]}", unpacked, content))
            elif (folder / name).is_file():
                files.append(IdxFile(folder / name, None, folder / name, content))
        if len(files) == len(FILES):
            unverified = (
                ""
                if all(file.checksum or file.content_sha256 for file in files)
                else "; unpacked files have no known checksum"
            )
            log.info("%s from %s%s", source.__name__, folder, unverified)
            return files
    return None


def _from_idx(name: str, files: list[IdxFile], classes: tuple[str, ...], sizes: SizeOptions) -> Dataset:
    return _read(name, tuple(files), tuple(file.stamp() for file in files), classes, sizes)


@lru_cache(maxsize=1)  # the jobs of a sweep share one set; keeping more would cost memory
def _read(
    name: str, files: tuple[IdxFile, ...], stamps: object, classes: tuple[str, ...], sizes: SizeOptions
) -> Dataset:
    """Read and verify the four files, again only if they have changed (`stamps`)."""
    train_file, _, test_file, _ = files
    train_images, train_labels, test_images, test_labels = (file.read() for file in files)
    _check_pair(train_file.path, train_images, train_labels, len(classes))
    _check_pair(test_file.path, test_images, test_labels, len(classes))
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{train_file.path} and {test_file.path} differ in their images: "
            f"{_size(train_images)} and {_size(test_images)}"
        )
    train_span, test_span = sizes.spans(len(train_images), len(test_images))
    mean, std = channel_statistics(train_images[train_span].unsqueeze(1))

    def split(images: Tensor, labels: Tensor, file: IdxFile, span: slice) -> Split:
        open_reader = partial(IdxImageReader, file, tuple(images.shape))
        return Split(images[span].unsqueeze(1), labels[span].long(), mean, std, classes, open_reader=open_reader)

    return Dataset(
        name,
        train=split(train_images, train_labels, train_file, train_span),
        test=split(test_images, test_labels, test_file, test_span),
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
