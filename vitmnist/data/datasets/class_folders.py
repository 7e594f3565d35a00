"""Finds the images of a folder with a subfolder per class, and splits them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitmnist.data.image_io import list_images
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
        skip_unreadable: leave out classes without images.

    Raises:
        ConfigError: a training folder without a test folder.
        DataError: fewer than two classes, classes without images, or too few images.
    """
    subfolders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    train_folder, test_folder = (
        next((subfolders[name] for name in names if name in subfolders), None) for names in (TRAIN_NAMES, TEST_NAMES)
    )
    if train_folder and test_folder:
        train, test = _list(train_folder, skip_unreadable), _list(test_folder, skip_unreadable)
    elif train_folder and any(path.is_dir() for path in train_folder.iterdir()):
        raise ConfigError(
            f"data.dataset.path={folder}: has a folder {train_folder.name} with classes, but none for the test; add "
            f"{folder / 'test'}, or type data.dataset.path={train_folder}, of which a part is then used for the test"
        )
    else:
        train, test = _divide(_list(folder, skip_unreadable), test_share)
        if not test:
            raise DataError(f"{folder}: too few pictures to take {test_share:g} of each class for the test")
    classes = sorted({name for _, name in train})
    if unknown := sorted({name for _, name in test}.difference(classes)):
        raise DataError(f"{folder}: the test folder has classes without training pictures: {shorten(unknown)}")
    train_samples, test_samples = ([(path, classes.index(name)) for path, name in part] for part in (train, test))
    return classes, train_samples, test_samples


def _list(folder: Path, skip_unreadable: bool) -> list[tuple[Path, str]]:
    """The pictures of all class folders, each with its class, ordered by a hash of the file's name."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise DataError(
            f"{folder}: two or more folders of a class are expected, with pictures in {folder}/CLASS/; "
            f"found: {shorten(names) or 'none'}"
        )
    paths = [path.relative_to(folder) for name in names for path in list_images(folder / name)]
    paths.sort(key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
    pictures = [(folder / path, path.parts[0]) for path in paths]
    if empty := sorted(set(names) - {name for _, name in pictures}):
        message = f"{folder}: no picture in {len(empty)} of its {len(names)} class folders: {shorten(empty)}"
        if not skip_unreadable or not pictures:
            raise DataError(f"{message}; remove them, or type data.dataset.skip_unreadable=true to leave them out")
        log.warning("%s; left out", message)
    return pictures


def _divide(
    pictures: list[tuple[Path, str]], test_share: float
) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """The pictures for training, and the first `test_share` of each class for the test."""
    counts = Counter(name for _, name in pictures)
    # At least one image of each class stays for training.
    left = {name: min(round(count * test_share), count - 1) for name, count in counts.items()}
    train: list[tuple[Path, str]] = []
    test: list[tuple[Path, str]] = []
    for path, name in pictures:
        (test if left[name] > 0 else train).append((path, name))
        left[name] -= 1
    return train, test


def shorten(names: Sequence[object]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(map(str, names[:SHOWN_NAMES])) + (", …" if len(names) > SHOWN_NAMES else "")
