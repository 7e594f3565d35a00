"""Finding the images of a folder with a subfolder per class, and splitting them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vitmnist.data.image_io import EXTENSIONS, is_picture, list_images
from vitmnist.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation")
SHOWN_NAMES = 5  # in a message

Samples = list[tuple[Path, int]]
"""Files with their labels, in the order of the split."""


def find_samples(folder: Path, test_share: float, skip_unreadable: bool) -> tuple[list[str], Samples, Samples]:
    """The classes, and the training and test samples of `folder/CLASS/`, or of `folder/train/CLASS/` and a test folder.

    Args:
        test_share: fraction of each class that is for the test, if there is no folder for it.
        skip_unreadable: leave classes without images out.

    Raises:
        ConfigError: a training folder without a test folder, or the reverse.
        DataError: no classes, classes without images, or too few images.
    """
    subfolders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    train_folder, test_folder = (
        next((subfolders[name] for name in names if name in subfolders), None) for names in (TRAIN_NAMES, TEST_NAMES)
    )
    for place, other, missing in ((train_folder, test_folder, "test"), (test_folder, train_folder, "train")):
        if place and not other and any(path.is_dir() for path in place.iterdir()):
            raise ConfigError(
                f"data.dataset.path={folder}: has a folder {place.name} with classes, but none for {missing}; add "
                f"{folder / missing}, or type data.dataset.path={place}, of which a part is then used for the test"
            )
    if not train_folder or not test_folder:
        files = _list_classes(folder, skip_unreadable)
        classes = [name for name, paths in files.items() if paths]
        # At least one image of each class stays for training.
        counts = [min(round(len(files[name]) * test_share), len(files[name]) - 1) for name in classes]
        test = _labelled(folder, [files[name][:count] for name, count in zip(classes, counts, strict=True)])
        train = _labelled(folder, [files[name][count:] for name, count in zip(classes, counts, strict=True)])
        if not test:
            raise DataError(f"{folder}: too few pictures to take {test_share:g} of each class for the test")
        return classes, train, test
    train_files, test_files = _list_classes(train_folder, skip_unreadable), _list_classes(test_folder, skip_unreadable)
    if list(train_files) != list(test_files):
        raise DataError(
            f"{train_folder} and {test_folder} differ in their classes: {list(train_files)}, {list(test_files)}"
        )
    classes = [name for name, paths in train_files.items() if paths]
    if only_tested := [name for name, paths in test_files.items() if paths and name not in classes]:
        raise DataError(f"{test_folder}: has pictures of {shorten(only_tested)}, but there are none to train on")
    train = _labelled(train_folder, [train_files[name] for name in classes])
    return classes, train, _labelled(test_folder, [test_files[name] for name in classes])


def _list_classes(folder: Path, skip_unreadable: bool) -> dict[str, list[Path]]:
    """The images of each class in `folder`, by the sorted names of the class folders, in the order of their hashes."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: holds no folder of a class; pictures are expected in {folder}/CLASS/")
    if loose := [path.name for path in sorted(folder.iterdir()) if is_picture(path) and path.is_file()]:
        log.warning(
            "%s: %d pictures are in no folder of a class and are not used: %s", folder, len(loose), shorten(loose)
        )
    # The same file may be linked twice: it must not be in both the training and the test split.
    unique = {os.path.realpath(path): path for name in reversed(names) for path in reversed(list_images(folder / name))}
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in sorted(unique.values(), key=partial(_hash, folder)):
        files[path.relative_to(folder).parts[0]].append(path)
    if len(names) == 1:
        raise DataError(
            f"{folder}: has one folder of a class, {names[0]}, and needs two or more"
            + (f"; its {len(loose)} pictures are in none" if loose else "")
        )
    if not unique:
        raise DataError(f"{folder}: no picture in any of its {len(names)} class folders ({', '.join(EXTENSIONS)})")
    if empty := [name for name in names if not files[name]]:
        message = f"{folder}: no picture in {len(empty)} of its {len(names)} class folders: {shorten(empty)}"
        if not skip_unreadable:
            raise DataError(f"{message}; remove them, or type data.dataset.skip_unreadable=true to leave them out")
        log.warning("%s; left out", message)
    return files


def _labelled(folder: Path, files: list[list[Path]]) -> Samples:
    """The files of all classes with their labels, in the order of their hashes."""
    samples = [(path, label) for label, paths in enumerate(files) for path in paths]
    return sorted(samples, key=lambda sample: _hash(folder, sample[0]))


def _hash(folder: Path, path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.relative_to(folder))).digest()


def shorten(names: Sequence[object]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(map(str, names[:SHOWN_NAMES])) + (", …" if len(names) > SHOWN_NAMES else "")
