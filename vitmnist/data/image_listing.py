"""Lists image files: in files, folders and patterns that a user names, and in a dataset, with classes and splits."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from vitmnist.errors import DataError, join_names

log = logging.getLogger(__name__)

JPEG = ".jpg", ".jpeg", ".jfif"
EXTENSIONS = (*JPEG, ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2")
"""The endings of pictures on every machine: a file that this build of Pillow cannot read is reported as unreadable."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""The splits, and what each may be called by a folder or in a table."""
SPLIT_OF = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
"""The split that each spelling stands for."""
nfc = partial(unicodedata.normalize, "NFC")
"""Composes a name: files that were copied from macOS have the same names decomposed (NFD)."""

Pictures = list[tuple[Path, str]]
"""Files with their classes, in the order of the split."""
LabelledFiles = list[tuple[Path, int]]
"""Files with their labels, likewise."""


def find_images(names: Sequence[str]) -> list[Path]:
    """The image files that files, folders and glob patterns name, each once, in this order.

    Raises:
        DataError: a folder without images, or a pattern without a match; names it.
    """
    images: list[Path] = []
    left_out: Counter[str] = Counter()
    for name in names:
        matches = [name] if not has_magic(name) or Path(name).exists() else sorted(glob(name, recursive=True))
        if not matches:
            raise DataError(f"{name}: matches no file")
        for path in map(Path, matches):
            # A file that does not exist is named when it is read.
            inside = list_images(path, left_out) if path.is_dir() else [path]
            if not inside:
                raise DataError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
            images += inside
    log_left_out(left_out)
    return list(dict.fromkeys(images))


def visible_folders(parent: Path, names: Iterable[str]) -> list[str]:
    """Subfolders, sorted, but hidden ones and links to a folder above, which are warned about: it has other classes."""
    visible = sorted(name for name in names if not name.startswith("."))
    upward = [name for name in visible if parent.resolve().is_relative_to(Path(parent, name).resolve())]
    if upward:
        log.warning("%s: links to a parent folder are left out: %s", parent, ", ".join(upward))
    return [name for name in visible if name not in upward]


def list_images(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The pictures in a folder and its subfolders, sorted; counts the other files by their endings in `left_out`.

    Only regular files are pictures; a link to a missing one counts, and is named when it is read. Links to folders are
    followed, each folder once: links that form a loop would never end. Hidden ones are not.
    """
    images: list[Path] = []
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real_path := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = visible_folders(Path(parent), folders)
        for path in (Path(parent, name) for name in names if not name.startswith(".")):  # macOS leaves files `._NAME`.
            if not path.name.lower().endswith(EXTENSIONS):
                left_out[path.suffix.lower()] += 1
            elif os.path.isfile(path) or not os.path.exists(path):
                images.append(path)
    return sorted(images)


def log_left_out(left_out: Counter[str]) -> None:
    """Log how many files are no pictures by their names."""
    if left_out:
        counts = ", ".join(f"{count} {ending or 'without'}" for ending, count in sorted(left_out.items()))
        log.warning("files left out by their endings: %s; pictures end in %s", counts, ", ".join(EXTENSIONS))


@dataclass
class TableColumns:
    """What the columns of a table of labels are called."""

    file: str = "file"
    label: str = "label"
    split: str = "split"


def find_samples(
    folder: Path, labels: Path | None, test_share: float, skip_unreadable: bool, columns: TableColumns, suffix: str
) -> tuple[list[str], dict[str, LabelledFiles]]:
    """The classes, and the samples of each split by its name: train, and those that there are of validation and test.

    Args:
        labels: a CSV file with the class of each file, in place of folders.
        test_share: fraction of each class that is for the test, if there is no other split; 0: none.
        skip_unreadable: leave out classes without images.
        columns, suffix: the names of the CSV file's columns, and what is appended to its names of files.

    Raises:
        DataError: fewer than two classes, classes without images in a split, too few images; as `read_labels`.
    """
    source = labels or folder
    if labels:
        splits = read_labels(labels, folder, skip_unreadable, columns, suffix)
    else:
        left_out: Counter[str] = Counter()
        folders = _split_folders(folder) or {"train": folder}
        splits = {split: _list_classes(path, left_out) for split, path in folders.items()}
        log_left_out(left_out)
    classes = sorted({name for _, name in splits["train"]})
    _check_classes(source, classes, splits, may_lack_classes=skip_unreadable)
    if len(splits) == 1 and test_share:
        train, test = _divide(splits["train"], test_share)
        if not test:
            raise DataError(f"{source}: too few pictures to take {test_share:g} of each class for the test")
        splits = {"train": train, "test": test}
    label_of = {name: label for label, name in enumerate(classes)}
    return classes, {split: [(path, label_of[name]) for path, name in pictures] for split, pictures in splits.items()}


def _check_classes(source: Path, classes: list[str], splits: dict[str, Pictures], may_lack_classes: bool) -> None:
    """Warn of classes whose names differ in case only; raise `DataError` if another split has other classes."""
    spellings = Counter(map(str.casefold, classes))
    if alike := [name for name in classes if spellings[name.casefold()] > 1]:
        log.warning("%s: classes that differ only in upper and lower case are different: %s", source, join_names(alike))
    for split, pictures in splits.items():
        in_split = {name for _, name in pictures}
        if unknown := sorted(in_split.difference(classes)):
            raise DataError(
                f"{source}: the {split} split has classes without training pictures: {join_names(unknown)}; the "
                f"classes of the training split are {join_names(classes)}; rename or remove these"
            )
        if (missing := sorted(set(classes) - in_split)) and not may_lack_classes:
            raise DataError(
                f"{source}: the {split} split lacks classes of the training split: {join_names(missing)}; add "
                "pictures of them, or type data.dataset.skip_unreadable=true"
            )


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folder of each split, in the order of `SPLITS`; empty if `folder` holds the folders of classes."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    by_split = {SPLIT_OF.get(path.name.lower()): path for path in subfolders}
    folders = {split: by_split[split] for split in SPLITS if split in by_split}
    if "train" not in folders or not any(path.is_dir() for path in folders["train"].iterdir()):
        return {}  # `train` may be a class
    log.info("%s: %s", folder, ", ".join(f"{split} split from {path.name}" for split, path in folders.items()))
    if others := [path.name for path in subfolders if path not in folders.values()]:
        log.warning("%s: not used: %s", folder, join_names(others))
    return folders


def _list_classes(folder: Path, left_out: Counter[str]) -> Pictures:
    """The pictures of all class folders, each with its class, ordered by a hash of the file's name."""
    names = visible_folders(folder, [path.name for path in folder.iterdir() if path.is_dir()])
    if len(names) < 2:
        raise DataError(
            f"{folder}: two or more folders of a class are expected, with pictures in {folder}/CLASS/ (to evaluate a "
            f"model, with the names of its classes); found: {join_names(names) or 'none'}"
        )
    paths = [path.relative_to(folder) for name in names for path in list_images(folder / name, left_out)]
    classes: dict[str, str] = {}  # Class by the real path of each folder with pictures
    inner: dict[str, set[str]] = {name: set() for name in names}  # Subfolders with pictures by class
    for parent in sorted({path.parent for path in paths}):
        inner[parent.parts[0]].update(parent.parts[1:2])
        name = classes.setdefault(os.path.realpath(folder / parent), parent.parts[0])
        if name != parent.parts[0]:
            raise DataError(f"{folder}: the classes {name} and {parent.parts[0]} have the same folder; remove a link")
    _refuse_splits(folder, inner)
    pictures = in_hash_order([(folder / path, nfc(path.parts[0])) for path in paths], folder)
    if empty := sorted({*map(nfc, names)} - {name for _, name in pictures}):
        log.warning("%s; left out", no_pictures(folder, empty, len(names)))
    return pictures


def _refuse_splits(folder: Path, inner: dict[str, set[str]]) -> None:
    """Raise `DataError` if classes with folders in them look like splits.

    They do if some have such a name, as `seg_test` has, or if all hold the same two or more folders.
    """
    words_of = {name: re.findall("[a-z]+", name.lower()) for name, folders in inner.items() if folders}
    splits = [name for name, words in words_of.items() if not SPLIT_OF.keys().isdisjoint(words)]
    first, *others = inner.values()
    if not splits and len(first) > 1 and all(folders == first for folders in others):
        splits = [*inner]
    if splits:
        raise DataError(
            f"{folder}: folders of classes that look like splits: {join_names(splits)}, with the folders "
            f"{join_names(sorted(inner[splits[0]]))}; name splits train, val and test, with a folder for each class in "
            "each, or type data.dataset.labels=FILE.csv, which names the class of each picture"
        )


def no_pictures(source: Path, empty: Sequence[str], size: int) -> str:
    """The message for classes without pictures, of `size` classes."""
    return f"{source}: no picture in {len(empty)} of its {size} classes: {join_names(empty)}"


def in_hash_order(pictures: Pictures, folder: Path) -> Pictures:
    """Pictures in the order of a hash of their names, which mixes the classes and stays when others are added."""
    return sorted(
        pictures, key=lambda pair: hashlib.sha256(os.fsencode(nfc(str(pair[0].relative_to(folder))))).digest()
    )


def _divide(pictures: Pictures, test_share: float) -> tuple[Pictures, Pictures]:
    """The pictures for training, and the first `test_share` of each class for the test."""
    counts = Counter(name for _, name in pictures)
    # At least one image of each class stays for training.
    left = {name: min(round(count * test_share), count - 1) for name, count in counts.items()}
    train: Pictures = []
    test: Pictures = []
    for path, name in pictures:
        (test if left[name] > 0 else train).append((path, name))
        left[name] -= 1
    return train, test


def _locate(name: str, folder: Path) -> Path:
    """The file that a table names, relative to `folder` or absolute; its name on disk may be NFC or NFD."""
    forms = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next((folder / form for form in (name, *forms) if (folder / form).exists()), folder / name)


def read_labels(
    labels: Path, folder: Path, skip_missing: bool, columns: TableColumns, suffix: str
) -> dict[str, Pictures]:
    """The pictures of each split that a CSV file names in its columns `file`, `label` and perhaps `split`.

    Without a column `split` all are for training.

    Raises:
        DataError: the file cannot be read, a line cannot be used, or there are no classes to train; names it.
    """
    lines: dict[Path, int] = {}
    splits: dict[str, Pictures] = {split: [] for split in SPLITS}
    try:
        with labels.open(encoding="utf-8-sig", newline="") as file:  # Spreadsheets begin UTF-8 with a mark.
            rows = csv.DictReader(file)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
            _check_columns(labels, rows.fieldnames, columns)
            for row in rows:
                try:
                    path, label, split = _parse_row(row, folder, columns, suffix)
                    if path in lines:
                        raise ValueError(f"{path} is in line {lines[path]} already")
                    if not (skip_missing or path.exists()):
                        raise ValueError(f"there is no file {path}")
                except ValueError as error:
                    raise DataError(f"{labels}:{rows.line_num}: {error}") from error
                lines[path] = rows.line_num
                splits[split].append((path, label))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data.dataset.labels={labels}: cannot be read: {error}") from error
    if len({name for _, name in splits["train"]}) < 2:
        raise DataError(f"{labels}: two or more labels of training pictures are expected")
    return {split: in_hash_order(pictures, folder) for split, pictures in splits.items() if pictures}


def _check_columns(labels: Path, names: Sequence[str], columns: TableColumns) -> None:
    """Raise `DataError` if a table lacks a column or has one twice, and warn of columns that are not used."""
    if several := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"{labels}:1: has more than one column {join_names(several)}; rename or remove one")
    required = [columns.file, columns.label]
    if columns.split != TableColumns.split:
        required.append(columns.split)
    if missing := [name for name in required if name not in names]:
        problem = f"has no column {' and '.join(missing)}, only {join_names(names) or 'none'}"
        raise DataError(f"{labels}:1: {problem}; set data.dataset.columns='{{file: NAME, label: NAME}}'")
    if unused := [repr(name) for name in names if name and name not in (*required, columns.split)]:
        log.warning("%s: columns that are not used: %s", labels, join_names(unused))


def _parse_row(row: dict[str, Any], folder: Path, columns: TableColumns, suffix: str) -> tuple[Path, str, str]:
    """The file, the class and the split of a row; raises `ValueError` that says why it cannot be used."""
    if None in row:
        raise ValueError("has more fields than the header; quote values with commas")
    name, label, spelling = (
        (row.get(column, "train") or "").strip() for column in (columns.file, columns.label, columns.split)
    )
    if not (name and label):
        raise ValueError(f"has no value in the column {columns.label if name else columns.file}")
    if not (split := SPLIT_OF.get(spelling.lower())):
        raise ValueError(f"{columns.split}={spelling}: must be train, val or test")
    path = _locate(f"{name}{suffix}", folder)
    if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
        raise ValueError(f"{name}: must be below data.dataset.path={folder}, without '..'")
    return path, nfc(label), split
