"""A folder of images, with a subfolder per class."""

from __future__ import annotations

import hashlib
import json
import logging
import os
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

from vitmnist.config.validation import bounded
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split
from vitmnist.data.decoded_cache import CacheEntry, decode_once
from vitmnist.data.image_io import EXTENSIONS, Mode, is_colour, list_images, read_picture, to_tensor
from vitmnist.data.tensors import TensorSet, channel_statistics
from vitmnist.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"  # below data.root
TEST_NAMES = ("test", "val", "valid", "validation")
SHOWN_NAMES = 5  # in a message
COLOUR_SAMPLES = 100  # training images checked for colour

Samples = list[tuple[Path, int]]
"""Files with their labels, in the order of the split."""


@dataclass
class ImageFolderOptions(SizeOptions):
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


class FolderImageReader:
    """Reads image i of a list of files, resized and converted."""

    def __init__(self, paths: list[Path], size: int, mode: Mode) -> None:
        self.paths, self.size, self.mode = paths, size, mode

    def __getitem__(self, index: int) -> Image.Image:
        return read_picture(self.paths[index], (self.size, self.size), self.mode)


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, or in `path/train/CLASS/` and `path/test/CLASS/`, decoded once into `root`.

    Within a split the images are ordered by a hash of their names, which mixes the classes and stays the same when
    images are added. Without a folder `test`, the first `test_share` of each class in this order are the test split.

    Raises:
        ConfigError: `path` is no such folder, or a size is larger than its split.
        DataError: classes without images, or unreadable images that are not to be skipped; names them.
    """
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    classes, train_samples, test_samples = _find_samples(folder, options)
    options.spans(len(train_samples), len(test_samples))  # refused before anything is decoded
    train, train_paths = _decode(folder, train_samples, options, root)
    test, test_paths = _decode(folder, test_samples, options, root)
    left_out = sorted({path for path, _ in train_samples + test_samples} - {*train_paths, *test_paths})
    log.info(
        "%s: %d training and %d test pictures of %d classes: %s",
        *(folder, len(train_paths), len(test_paths), len(classes), _shorten(classes)),
    )
    if left_out:
        log.warning("%s: %d pictures cannot be read and are left out: %s", folder, len(left_out), _shorten(left_out))
    if coloured := train.notes.get("coloured"):
        log.warning(
            "%s: %d of the first %d training pictures are in colour, which data.dataset.mode=grey drops; "
            "data.dataset.mode=rgb keeps it",
            *(folder, coloured, min(COLOUR_SAMPLES, len(train_paths))),
        )
    train_span, test_span = options.spans(len(train_paths), len(test_paths))
    mean, std = tuple(train.notes["mean"]), tuple(train.notes["std"])
    if options.train_size:
        mean, std = channel_statistics(train.tensors.images[train_span])

    def split(entry: CacheEntry, paths: list[Path], span: slice) -> Split:
        return Split(
            entry.tensors.images, entry.tensors.labels, mean, std, tuple(classes),
            mapped=True, sha256=entry.sha256, files=[str(path.relative_to(folder)) for path in paths],
            open_reader=partial(FolderImageReader, paths, options.size, options.mode),
        ).part(span)  # fmt: skip

    return Dataset(
        folder.resolve().name,
        train=split(train, train_paths, train_span),
        test=split(test, test_paths, test_span),
        skipped=len(left_out),
    )


def _find_samples(folder: Path, options: ImageFolderOptions) -> tuple[list[str], Samples, Samples]:
    """The classes, and the training and test samples."""
    subfolders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    train_folder = subfolders.get("train")
    test_folder = next((subfolders[name] for name in TEST_NAMES if name in subfolders), None)
    for place, other, missing in (
        (train_folder, test_folder, " or ".join(TEST_NAMES)),
        (test_folder, train_folder, "train"),
    ):
        if place and not other and any(path.is_dir() for path in place.iterdir()):
            raise ConfigError(
                f"data.dataset.path={options.path}: has a folder {place.name} with classes, but no {missing}"
            )
    if not train_folder or not test_folder:
        files = _list_classes(folder, options)
        classes = [name for name, paths in files.items() if paths]
        # At least one image of each class stays for training.
        counts = [min(round(len(files[name]) * options.test_share), len(files[name]) - 1) for name in classes]
        test = _labelled(folder, [files[name][:count] for name, count in zip(classes, counts, strict=True)])
        train = _labelled(folder, [files[name][count:] for name, count in zip(classes, counts, strict=True)])
        if not test:
            raise DataError(f"{folder}: too few pictures to take {options.test_share:g} of each class for the test")
        return classes, train, test
    train_files, test_files = _list_classes(train_folder, options), _list_classes(test_folder, options)
    if list(train_files) != list(test_files):
        raise DataError(
            f"{train_folder} and {test_folder} differ in their classes: {list(train_files)}, {list(test_files)}"
        )
    classes = [name for name, paths in train_files.items() if paths]
    if only_tested := [name for name, paths in test_files.items() if paths and name not in classes]:
        raise DataError(f"{test_folder}: has pictures of {_shorten(only_tested)}, but there are none to train on")
    train = _labelled(train_folder, [train_files[name] for name in classes])
    return classes, train, _labelled(test_folder, [test_files[name] for name in classes])


def _list_classes(folder: Path, options: ImageFolderOptions) -> dict[str, list[Path]]:
    """The images of each class in `folder`, by the sorted names of the class folders, in the order of their hashes."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: holds no folder of a class; pictures are expected in {folder}/CLASS/")
    # The same file may be linked twice: it must not be in both the training and the test split.
    unique = {os.path.realpath(path): path for name in reversed(names) for path in reversed(list_images(folder / name))}
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in sorted(unique.values(), key=partial(_hash, folder)):
        files[path.relative_to(folder).parts[0]].append(path)
    if not unique:
        raise DataError(f"{folder}: no picture in any of its {len(names)} class folders ({', '.join(EXTENSIONS)})")
    if empty := [name for name in names if not files[name]]:
        message = f"{folder}: no picture in {len(empty)} of its {len(names)} class folders: {_shorten(empty)}"
        if not options.skip_unreadable:
            raise DataError(f"{message}; remove them, or type data.dataset.skip_unreadable=true to leave them out")
        log.warning("%s; left out", message)
    return files


def _labelled(folder: Path, files: list[list[Path]]) -> Samples:
    """The files of all classes with their labels, in the order of their hashes."""
    samples = [(path, label) for label, paths in enumerate(files) for path in paths]
    return sorted(samples, key=lambda sample: _hash(folder, sample[0]))


def _hash(folder: Path, path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.relative_to(folder))).digest()


def _decode(folder: Path, samples: Samples, options: ImageFolderOptions, root: Path) -> tuple[CacheEntry, list[Path]]:
    """The decoded images, and the files that could be read."""
    unreadable: dict[int, str] = {}

    def decode() -> Iterator[tuple[Tensor, Tensor]]:
        for index, (path, label) in enumerate(samples):
            try:
                image = to_tensor(read_picture(path, (options.size, options.size), options.mode))
            except DataError as error:
                unreadable[index] = str(error)
                continue
            yield image.unsqueeze(0), torch.tensor([label])
        if len(unreadable) == len(samples):
            raise _unreadable_error(list(unreadable.values()), samples, options)

    def make_notes(tensors: TensorSet) -> dict[str, Any]:
        mean, std = channel_statistics(tensors.images)
        notes: dict[str, Any] = {"mean": mean, "std": std, "unreadable": list(unreadable.items())}
        if options.mode == Mode.grey:
            readable = (path for index, (path, _) in enumerate(samples) if index not in unreadable)
            notes["coloured"] = sum(is_colour(path) for path in islice(readable, COLOUR_SAMPLES))
        return notes

    # Everything that changes the pixels, but not the files' contents: reading those would take as long as decoding.
    files = [(str(path.relative_to(folder)), label, *_stat(path)) for path, label in samples]
    fingerprint = json.dumps([str(folder.resolve()), options.size, options.mode.value, files])
    fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()
    entry = decode_once(root / CACHE, fingerprint, decode, make_notes, options.verify_cache)
    left_out = dict(entry.notes["unreadable"])
    if left_out and not options.skip_unreadable:
        raise _unreadable_error(list(left_out.values()), samples, options)
    return entry, [path for index, (path, _) in enumerate(samples) if index not in left_out]


def _stat(path: Path) -> tuple[int, int, bool]:
    """Size, time of change, and whether the file may be read: a permission can be mended without a change."""
    try:
        stat = path.stat()
    except OSError:  # a dangling link, which is found unreadable when it is decoded
        return 0, 0, False
    return stat.st_size, stat.st_mtime_ns, os.access(path, os.R_OK)


def _shorten(names: Sequence[object]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(map(str, names[:SHOWN_NAMES])) + (", …" if len(names) > SHOWN_NAMES else "")


def _unreadable_error(messages: list[str], samples: Samples, options: ImageFolderOptions) -> DataError:
    shown = "\n".join(messages[:SHOWN_NAMES])
    more = f"\n… and {len(messages) - SHOWN_NAMES} more" if len(messages) > SHOWN_NAMES else ""
    advice = "mend or remove them, or type data.dataset.skip_unreadable=true to leave them out"
    advice = "none is left" if options.skip_unreadable else advice
    return DataError(f"{len(messages)} of {len(samples)} pictures cannot be read:\n{shown}{more}\n{advice}")
