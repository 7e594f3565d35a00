"""A folder of one's own pictures, a subfolder per class."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from vitmnist.config.validation import bounded
from vitmnist.data.datasets.base import DATASETS, Dataset, Sizes, Split, first
from vitmnist.data.decoded_cache import Cached, decode_once, forget
from vitmnist.data.image_io import ENDINGS, Mode, is_colour, read_picture
from vitmnist.data.tensors import TensorSet, channel_statistics
from vitmnist.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"
TEST_NAMES = ("test", "val", "valid", "validation")
SHOWN = 5  # so many names in a message
LOOKED_AT = 100  # so many pictures are looked at for colour


@dataclass
class ImageFolderOptions(Sizes):
    """See `conf/data/dataset/image_folder.yaml`."""

    path: str = MISSING
    size: int = bounded(28, at_least=1)
    mode: Mode = Mode.grey
    test_share: float = bounded(0.2, above=0, below=1)
    skip_unreadable: bool = False
    verify_cache: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == Mode.grey else 3), self.size, self.size


@dataclass(frozen=True)
class Listed:
    """The pictures of a split as files, in the split's order, with their labels."""

    paths: list[Path]
    labels: list[int]


class FolderImageReader:
    """Picture i of a list of files, resized and converted."""

    def __init__(self, paths: list[Path], size: int, mode: Mode) -> None:
        self.paths, self.size, self.mode = paths, size, mode

    def __getitem__(self, index: int) -> Image.Image:
        return read_picture(self.paths[index], (self.size, self.size), self.mode)


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Pictures in `path/CLASS/`, or in `path/train/CLASS/` and `path/test/CLASS/`, decoded once into `root`.

    Within a split the pictures stand in an order drawn from their names, which mixes the classes and stays as it is
    when pictures are added. Without a folder `test`, the same draw takes `test_share` of each class for the test.

    Raises:
        ConfigError: `path` is no such folder, or a size is larger than its split.
        DataError: classes without pictures, or pictures that cannot be read, if they are not to be skipped; names them.
    """
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    classes, train_files, test_files = _find(folder, options)
    train, train_paths = _decode(folder, train_files, options, root)
    test, test_paths = _decode(folder, test_files, options, root)
    left_out = sorted({*train_files.paths, *test_files.paths} - {*train_paths, *test_paths})
    log.info(
        "%s: %d training and %d test pictures of %d classes: %s",
        *(folder, len(train_paths), len(test_paths), len(classes), _some(classes)),
    )
    if left_out:
        log.warning("%s: %d pictures cannot be read and are left out: %s", folder, len(left_out), _some(left_out))
    if colour := train.notes.get("colour"):
        log.warning(
            "%s: %d of the first %d training pictures are in colour, which data.dataset.mode=grey drops; "
            "data.dataset.mode=rgb keeps it",
            *(folder, colour, min(LOOKED_AT, len(train_paths))),
        )
    take_train = first("train_size", options.train_size, len(train_paths))
    take_test = first("test_size", options.test_size, len(test_paths))
    mean, std = tuple(train.notes["mean"]), tuple(train.notes["std"])
    if options.train_size:
        mean, std = channel_statistics(train.arrays.images[take_train])

    def split(cached: Cached, paths: list[Path], take: slice) -> Split:
        images, labels = cached.arrays.images[take], cached.arrays.labels[take]
        whole = len(images) == len(cached.arrays)
        pictures = partial(FolderImageReader, paths, options.size, options.mode)
        files = [str(path.relative_to(folder)) for path in paths[take]]
        return Split(
            images, labels, mean, std, tuple(classes),
            mapped=True, pictures=pictures, sha256=cached.sha256 if whole else None, files=files,
        )  # fmt: skip

    return Dataset(
        folder.resolve().name,
        train=split(train, train_paths, take_train),
        test=split(test, test_paths, take_test),
        skipped=len(left_out),
    )


def _find(folder: Path, options: ImageFolderOptions) -> tuple[list[str], Listed, Listed]:
    """The classes, and the training and the test pictures."""
    named = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    train_folder = named.get("train")
    test_folder = next((named[name] for name in TEST_NAMES if name in named), None)
    for place, other, wanted in (
        (train_folder, test_folder, " or ".join(TEST_NAMES)),
        (test_folder, train_folder, "train"),
    ):
        if place and not other and any(path.is_dir() for path in place.iterdir()):
            raise ConfigError(
                f"data.dataset.path={options.path}: has a folder {place.name} with classes, but no {wanted}"
            )
    if train_folder and test_folder:
        classes, train = _list(train_folder, options)
        test_classes, test = _list(test_folder, options)
        if classes != test_classes:
            raise DataError(f"{train_folder} and {test_folder} differ in their classes: {classes}, {test_classes}")
    else:
        classes, files = _list(folder, options)
        train, test = _divide(files, options.test_share)
        if not train.paths or not test.paths:
            raise DataError(f"{folder}: too few pictures to take {options.test_share:g} of each class for the test")
    first("train_size", options.train_size, len(train.paths))  # refused before anything is decoded
    first("test_size", options.test_size, len(test.paths))
    kept = sorted(set(train.labels))
    if only_tested := [classes[label] for label in sorted(set(test.labels) - set(kept))]:
        raise DataError(f"{test_folder}: has pictures of {_some(only_tested)}, but there are none to train on")
    numbers = {label: number for number, label in enumerate(kept)}
    train, test = (Listed(files.paths, [numbers[label] for label in files.labels]) for files in (train, test))
    return [classes[label] for label in kept], train, test


class VisibleFolder(ImageFolder):  # type: ignore[misc]
    """Torchvision's data set without the folders that begin with a dot."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """The classes, sorted, and their labels."""
        names = sorted(path.name for path in Path(directory).iterdir() if path.is_dir() and path.name[0] != ".")
        if not names:
            raise FileNotFoundError("holds no folder of a class")
        return names, {name: label for label, name in enumerate(names)}


def _list(folder: Path, options: ImageFolderOptions) -> tuple[list[str], Listed]:
    """The class folders and the pictures of a folder, in an order drawn from the pictures' names."""
    try:
        found = VisibleFolder(str(folder), allow_empty=True)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: {error}; pictures are expected in {folder}/CLASS/") from error
    filled = set(found.targets)
    if not filled:
        raise DataError(f"{folder}: no picture in any of its {len(found.classes)} class folders ({', '.join(ENDINGS)})")
    if empty := [name for label, name in enumerate(found.classes) if label not in filled]:
        message = f"{folder}: no picture in {len(empty)} of its {len(found.classes)} class folders: {_some(empty)}"
        if not options.skip_unreadable:
            raise DataError(f"{message}; remove them, or type data.dataset.skip_unreadable=true to leave them out")
        log.warning("%s; left out", message)
    # A link may lead to a picture that is listed already: it must not stand in the training and in the test part.
    once = {os.path.realpath(path): (path, label) for path, label in reversed(found.samples)}
    drawn = sorted(
        (hashlib.sha256(os.fsencode(Path(path).relative_to(folder))).digest(), path, label)
        for path, label in once.values()
    )
    return found.classes, Listed([Path(path) for _, path, _ in drawn], [label for *_, label in drawn])


def _divide(files: Listed, test_share: float) -> tuple[Listed, Listed]:
    """The training and the test part, the same share of each class."""
    taken = dict.fromkeys(files.labels, 0)
    # One of each class stays for training, however few there are.
    wanted = {label: min(round(count * test_share), count - 1) for label, count in Counter(files.labels).items()}
    train, test = Listed([], []), Listed([], [])
    for path, label in zip(files.paths, files.labels, strict=True):
        part = test if taken[label] < wanted[label] else train
        taken[label] += 1
        part.paths.append(path)
        part.labels.append(label)
    return train, test


def _decode(folder: Path, files: Listed, options: ImageFolderOptions, root: Path) -> tuple[Cached, list[Path]]:
    """The decoded pictures, and the files that could be read."""
    unreadable: dict[int, str] = {}

    def decode() -> Iterator[tuple[Tensor, Tensor]]:
        for index, (path, label) in enumerate(zip(files.paths, files.labels, strict=True)):
            try:
                picture = pil_to_tensor(read_picture(path, (options.size, options.size), options.mode))
            except DataError as error:
                unreadable[index] = str(error)
                continue
            yield picture.unsqueeze(0), torch.tensor([label])
        if len(unreadable) == len(files.paths):
            raise _cannot_read(list(unreadable.values()), files, options)

    def annotate(arrays: TensorSet) -> dict[str, Any]:
        mean, std = channel_statistics(arrays.images)
        notes: dict[str, Any] = {"mean": mean, "std": std, "unreadable": list(unreadable.items())}
        if options.mode == Mode.grey:
            readable = (path for index, path in enumerate(files.paths) if index not in unreadable)
            notes["colour"] = sum(is_colour(path) for path in islice(readable, LOOKED_AT))
        return notes

    # Whatever changes the pixels; reading every file for it each time would be to decode again.
    seen = [
        (str(path.relative_to(folder)), label, *_size_and_time(path))
        for path, label in zip(files.paths, files.labels, strict=True)
    ]
    fingerprint = json.dumps([str(folder.resolve()), options.size, options.mode.value, seen])
    fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()
    cached = decode_once(root / CACHE, fingerprint, decode, annotate, options.verify_cache)
    left_out = dict(cached.notes["unreadable"])
    if not unreadable and any(_readable(files.paths[index], options) for index in left_out):
        # What failed then, a permission say, was mended without a change of the file.
        forget(root / CACHE, fingerprint)
        cached = decode_once(root / CACHE, fingerprint, decode, annotate, options.verify_cache)
        left_out = dict(cached.notes["unreadable"])
    if left_out and not options.skip_unreadable:
        raise _cannot_read(list(left_out.values()), files, options)
    return cached, [path for index, path in enumerate(files.paths) if index not in left_out]


def _some(names: Sequence[object]) -> str:
    """The first of many names, for a message."""
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:  # a link that leads nowhere, which will be found unreadable
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _readable(path: Path, options: ImageFolderOptions) -> bool:
    try:
        read_picture(path, (options.size, options.size), options.mode)
    except DataError:
        return False
    return True


def _cannot_read(messages: list[str], files: Listed, options: ImageFolderOptions) -> DataError:
    shown = "\n".join(messages[:SHOWN])
    more = f"\n… and {len(messages) - SHOWN} more" if len(messages) > SHOWN else ""
    return DataError(
        f"{len(messages)} of {len(files.paths)} pictures cannot be read:\n{shown}{more}\n"
        + (
            "none is left"
            if options.skip_unreadable
            else "mend or remove them, or type data.dataset.skip_unreadable=true to leave them out"
        )
    )
