"""Finding the images of a folder with a subfolder per class, and splitting them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
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
    for present, other, missing in ((train_folder, test_folder, "test"), (test_folder, train_folder, "train")):
        if present and not other and any(path.is_dir() for path in present.iterdir()):
            raise ConfigError(
                f"data.dataset.path={folder}: has a folder {present.name} with classes, but none for {missing}; add "
                f"{folder / missing}, or type data.dataset.path={present}, of which a part is then used for the test"
            )
    if train_folder and test_folder:
        (names, train), (test_names, test) = (_list(part, skip_unreadable) for part in (train_folder, test_folder))
        if names != test_names:
            raise DataError(f"{train_folder} and {test_folder} differ in their classes: {names}, {test_names}")
    else:
        train, test, pictures = [], [], _list(folder, skip_unreadable)[1]
        counts = Counter(name for _, name in pictures)
        # At least one image of each class stays for training.
        left = {name: min(round(count * test_share), count - 1) for name, count in counts.items()}
        for path, name in pictures:
            (test if left[name] > 0 else train).append((path, name))
            left[name] -= 1
        if not test:
            raise DataError(f"{folder}: too few pictures to take {test_share:g} of each class for the test")
    classes = sorted({name for _, name in train})
    if only_tested := sorted({name for _, name in test}.difference(classes)):
        raise DataError(f"{test_folder}: has pictures of {shorten(only_tested)}, but there are none to train on")
    train_samples, test_samples = ([(path, classes.index(name)) for path, name in part] for part in (train, test))
    return classes, train_samples, test_samples


def _list(folder: Path, skip_unreadable: bool) -> tuple[list[str], list[tuple[Path, str]]]:
    """The names of the class folders, and each picture in them with its class, ordered by a hash of the file's name."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: holds no folder of a class; pictures are expected in {folder}/CLASS/")
    if loose := [path.name for path in sorted(folder.iterdir()) if is_picture(path) and path.is_file()]:
        log.warning(
            "%s: %d pictures are in no folder of a class and are not used: %s", folder, len(loose), shorten(loose)
        )
    # The same file may be linked twice: it must not be in both the training and the test split.
    unique = {os.path.realpath(path): path for name in reversed(names) for path in reversed(list_images(folder / name))}
    if len(names) == 1:
        raise DataError(
            f"{folder}: has one folder of a class, {names[0]}, and needs two or more"
            + (f"; its {len(loose)} pictures are in none" if loose else "")
        )
    if not unique:
        raise DataError(f"{folder}: no picture in any of its {len(names)} class folders ({', '.join(EXTENSIONS)})")
    relative = sorted((path.relative_to(folder) for path in unique.values()), key=_hash)
    pictures = [(folder / path, path.parts[0]) for path in relative]
    if empty := sorted(set(names) - {name for _, name in pictures}):
        message = f"{folder}: no picture in {len(empty)} of its {len(names)} class folders: {shorten(empty)}"
        if not skip_unreadable:
            raise DataError(f"{message}; remove them, or type data.dataset.skip_unreadable=true to leave them out")
        log.warning("%s; left out", message)
    return names, pictures


def _hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path)).digest()


def shorten(names: Sequence[object]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(map(str, names[:SHOWN_NAMES])) + (", …" if len(names) > SHOWN_NAMES else "")
