"""CIFAR-10 and CIFAR-100, read from torchvision's verified files."""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import tarfile
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split
from vitmnist.data.datasets.downloading import find_or_download
from vitmnist.data.tensors import channel_statistics
from vitmnist.errors import DataError

log = logging.getLogger(__name__)

SHAPE = (3, 32, 32)
MAX_NBYTES = 1 << 28  # of a file; the largest has 155 MB
SAFE_GLOBALS = {  # by their names of NumPy 1, with which the files were written
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


@dataclass(unsafe_hash=True)
class CifarOptions(SizeOptions):
    """See `conf/data/dataset/cifar10.yaml`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return SHAPE


@DATASETS.register("cifar10", CifarOptions)
def cifar10(sizes: CifarOptions, root: Path) -> Dataset:
    """CIFAR-10 (Krizhevsky, 2009), from `root` or by torchvision's downloader."""
    from torchvision.datasets import CIFAR10  # takes 2 s

    return _load("cifar10", CIFAR10, root, sizes)


@DATASETS.register("cifar100", CifarOptions)
def cifar100(sizes: CifarOptions, root: Path) -> Dataset:
    """CIFAR-100 (Krizhevsky, 2009) with its 100 fine labels, from `root` or by torchvision's downloader."""
    from torchvision.datasets import CIFAR100

    return _load("cifar100", CIFAR100, root, sizes)


class MemoryImageReader:
    """Image i of a tensor: a CIFAR file holds thousands of images, and torchvision too keeps them in memory."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index].permute(1, 2, 0).numpy())


class ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists, dicts and NumPy arrays, and nothing that could run code.

    Only files with the published MD5 are read. MD5 is too weak to be the only reason to trust a pickle, and to allow
    three names is simpler than a parser.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may call; raises `UnpicklingError` for anything else."""
        if (module, name) not in SAFE_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return SAFE_GLOBALS[module, name]


def _load(name: str, source: Any, root: Path, sizes: SizeOptions) -> Dataset:
    """The data set of a torchvision class."""
    from torchvision.datasets import utils

    find = partial(_find, source, root)
    # Only the archive is downloaded: to make the data set itself, torchvision would also unpack and read it.
    fetch = partial(utils.download_url, source.url, str(root), source.filename, source.tgz_md5)
    place = find_or_download(source.__name__, root, find, fetch, [source.filename], root)
    stats = [path.stat() for path in (sorted(place.iterdir()) if place.is_dir() else [place])]
    return _read(name, source, place, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats), sizes)


def _find(source: Any, root: Path) -> Path | None:
    """The folder with all files of a data set, or else its archive."""
    folder: Path = root / source.base_folder
    archive: Path = root / source.filename
    if not (missing := [name for name in _checksums(source) if not (folder / name).is_file()]):
        return folder
    if folder.is_dir():
        log.warning("%s: is not used, because %s is missing", folder, ", ".join(missing))
    return archive if archive.is_file() else None


def _checksums(source: Any) -> dict[str, str]:
    """The MD5 of each file, as torchvision publishes it."""
    return {**dict(source.train_list + source.test_list), source.meta["filename"]: source.meta["md5"]}


@lru_cache(maxsize=1)  # the jobs of a sweep share one set; keeping more would cost memory
def _read(name: str, source: Any, place: Path, stamps: object, sizes: SizeOptions) -> Dataset:
    """Read and verify the files in a folder or an archive, again only if they have changed (`stamps`)."""
    files = _read_verified(source, place)
    classes = tuple(files[source.meta["filename"]][source.meta["key"]])
    train_images, train_labels = _join([files[file] for file, _ in source.train_list])
    test_images, test_labels = _join([files[file] for file, _ in source.test_list])
    train_span, test_span = sizes.spans(len(train_images), len(test_images))
    mean, std = channel_statistics(train_images[train_span])

    def split(images: Tensor, labels: Tensor, span: slice) -> Split:
        open_reader = partial(MemoryImageReader, images)
        return Split(images[span], labels[span], mean, std, classes, open_reader=open_reader)

    return Dataset(
        name,
        train=split(train_images, train_labels, train_span),
        test=split(test_images, test_labels, test_span),
    )


def _read_verified(source: Any, place: Path) -> dict[str, Any]:
    """The unpickled dict in each file.

    Raises:
        DataError: a file is missing, cannot be read, or has another checksum.
    """
    advice = f"remove {place} to download it again"
    try:
        contents = _read_contents(source, place)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{place}: cannot be read: {error}; {advice}") from error
    files = {}
    for name, expected in _checksums(source).items():
        if name not in contents:
            raise DataError(f"{place} is incomplete: {name} is missing; {advice}")
        content = contents.pop(name)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DataError(
                f"{place / name} is not the published file: expected md5 {expected}, found {found}; {advice}"
            )
        files[name] = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    return files


def _read_contents(source: Any, place: Path) -> dict[str, bytes]:
    """The bytes of each file that is there."""
    if place.is_dir():
        return {name: (place / name).read_bytes() for name in _checksums(source)}
    names = {f"{source.base_folder}/{name}": name for name in _checksums(source)}
    contents = {}
    # Read as a stream, because going back would decompress everything again. Nothing is extracted, so that no name in
    # the archive can write anywhere, and no file is read beyond the size that one can have.
    with tarfile.open(place, "r|gz") as archive:
        for member in archive:
            if member.name in names and (file := archive.extractfile(member)):
                contents[names[member.name]] = file.read(MAX_NBYTES)
    return contents


def _join(batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Images uint8 `[N, 3, 32, 32]` and labels int64 `[N]` of several files; of CIFAR-100 the fine labels."""
    images = torch.from_numpy(np.concatenate([batch["data"] for batch in batches])).view(-1, *SHAPE)
    labels = [label for batch in batches for label in batch["labels" if "labels" in batch else "fine_labels"]]
    return images, torch.tensor(labels)
