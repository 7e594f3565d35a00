"""Lists the image files that a user names, or that are in a folder of splits and classes."""

import hashlib
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path

from vitmnist.errors import DataError, join_names

log = logging.getLogger(__name__)

EXTENSIONS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2",
)  # fmt: skip
"""The extensions of image files, the same on every machine. Files that the installed Pillow cannot read are errors."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""The splits, each with the names that its folder, or its rows in a table, can have."""
SPLIT_OF = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
"""The split of each name in `SPLITS`."""

to_nfc = partial(unicodedata.normalize, "NFC")
"""Composes the accents of a name (NFC): the names of files copied from macOS are decomposed (NFD)."""

ClassifiedFiles = list[tuple[Path, str]]
"""Image files with the names of their classes."""
LabelledFiles = list[tuple[Path, int]]
"""Image files with their labels."""


def find_images(names: Sequence[str]) -> list[Path]:
    """Expand the names of files and folders, and glob patterns, to image files: each once, in order.

    A file that does not exist is reported when it is read.

    Raises:
        DataError: a folder has no images, or a pattern has no match.
    """
    images: list[Path] = []
    for name in names:
        matches = [name] if not has_magic(name) or Path(name).exists() else sorted(glob(name, recursive=True))
        if not matches:
            raise DataError(f"{name}: matches no file")
        for path in map(Path, matches):
            inside = select_images(list_files(path)) if path.is_dir() else [path]
            if not inside:
                raise DataError(f"{path}: holds no image ({', '.join(EXTENSIONS)})")
            images += inside
    return list(dict.fromkeys(images))


def list_files(folder: Path) -> list[Path]:
    """Return the visible regular files in a folder and its subfolders, sorted.

    Links to folders are followed, but each folder is read once. A link to a missing file is included, so that reading
    it reports the error.
    """
    files: list[Path] = []
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real_path := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = list_visible_folders(Path(parent), folders)
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [path for path in paths if path.is_file() or not path.exists()]
    return sorted(files)


def list_visible_folders(parent: Path, names: Iterable[str]) -> list[str]:
    """Return the sorted names of the subfolders to read, without hidden folders and links upward.

    A link to `parent` or a folder above it is logged: it would add the images of all classes to one class.
    """
    visible = sorted(name for name in names if not name.startswith("."))
    upward = [name for name in visible if parent.resolve().is_relative_to(Path(parent, name).resolve())]
    if upward:
        log.warning("%s: links to a parent folder are left out: %s", parent, ", ".join(upward))
    return [name for name in visible if name not in upward]


def select_images(files: Sequence[Path]) -> list[Path]:
    """Return the files with the extension of an image, and log the number of other files by extension."""
    images = [path for path in files if path.name.lower().endswith(EXTENSIONS)]
    others = Counter(path.suffix.lower() for path in set(files).difference(images))
    if others:
        counts = ", ".join(f"{count} {extension or 'without'}" for extension, count in sorted(others.items()))
        log.warning("files left out by their endings: %s; images end in %s", counts, ", ".join(EXTENSIONS))
    return images


def list_splits(folder: Path) -> dict[str, ClassifiedFiles]:
    """Return the images of each split, from folders of classes. Without folders of splits, all are training images.

    Raises:
        DataError: there are fewer than two folders of classes, or classes look like splits.
    """
    folders = _split_folders(folder) or {"train": folder}
    files = {split: _list_class_files(path) for split, path in folders.items()}
    images = set(select_images([path for by_class in files.values() for path in chain(*by_class.values())]))
    return {split: _classify(path, files[split], images) for split, path in folders.items()}


def label_splits(
    source: Path, splits: dict[str, ClassifiedFiles], folder: Path, test_share: float, allow_missing_classes: bool
) -> tuple[list[str], dict[str, LabelledFiles]]:
    """Return the sorted classes, and the labelled images of each split in an order that mixes the classes.

    Args:
        source: the folder or the table of labels, for messages.
        test_share: the fraction of each class for a test split if there is only a training split; 0: none.

    Raises:
        DataError: the classes of the splits differ, or there are too few images for a test split.
    """
    classes = sorted({name for _, name in splits["train"]})
    _check_classes(source, classes, splits, allow_missing_classes)
    splits = {split: sort_by_hash(files, folder) for split, files in splits.items()}
    if len(splits) == 1 and test_share:
        train, test = _take_test_split(splits["train"], test_share)
        if not test:
            raise DataError(f"{source}: too few images to take {test_share:g} of each class for the test")
        splits = {"train": train, "test": test}
    label_of = {name: label for label, name in enumerate(classes)}
    return classes, {split: [(path, label_of[name]) for path, name in files] for split, files in splits.items()}


def describe_empty_classes(source: Path, empty: Sequence[str], num_classes: int) -> str:
    return f"{source}: no image in {len(empty)} of its {num_classes} classes: {join_names(empty)}"


def sort_by_hash(files: ClassifiedFiles, folder: Path) -> ClassifiedFiles:
    """Sort images by a hash of their names. The order mixes the classes, and stays when images are added."""
    return sorted(
        files, key=lambda file: hashlib.sha256(os.fsencode(to_nfc(file[0].relative_to(folder).as_posix()))).digest()
    )


def _check_classes(
    source: Path, classes: list[str], splits: dict[str, ClassifiedFiles], allow_missing_classes: bool
) -> None:
    for split, files in splits.items():
        split_classes = {name for _, name in files}
        if unknown := sorted(split_classes.difference(classes)):
            raise DataError(
                f"{source}: the {split} split has classes without training images: {join_names(unknown)}; the "
                f"classes of the training split are {join_names(classes)}; rename or remove these"
            )
        if (missing := sorted(set(classes) - split_classes)) and not allow_missing_classes:
            raise DataError(
                f"{source}: the {split} split lacks classes of the training split: {join_names(missing)}; add "
                "images of them, or set data.dataset.skip_unreadable=true"
            )


def _split_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each split in the order of `SPLITS`; empty if `folder` contains folders of classes."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    by_split = {SPLIT_OF.get(path.name.lower()): path for path in subfolders}
    folders = {split: by_split[split] for split in SPLITS if split in by_split}
    if "train" not in folders or not any(path.is_dir() for path in folders["train"].iterdir()):
        return {}  # `train` can be the name of a class.
    log.info("%s: %s", folder, ", ".join(f"{split} split from {path.name}" for split, path in folders.items()))
    others = [path.name for path in subfolders if path not in folders.values()]
    if repeated := [name for name in others if name.lower() in SPLIT_OF]:
        raise DataError(f"{folder}: more than one folder of a split: {join_names(repeated)}; rename or remove it")
    if others:
        log.warning("%s: not used: %s", folder, join_names(others))
    return folders


def _list_class_files(folder: Path) -> dict[str, list[Path]]:
    classes = list_visible_folders(folder, [path.name for path in folder.iterdir() if path.is_dir()])
    if len(classes) < 2:
        raise DataError(
            f"{folder}: two or more folders of a class are expected, with images in {folder}/CLASS/ (to evaluate a "
            f"model, with the names of its classes); found: {join_names(classes) or 'none'}"
        )
    return {name: list_files(folder / name) for name in classes}


def _classify(folder: Path, class_files: dict[str, list[Path]], images: set[Path]) -> ClassifiedFiles:
    """Return the images among the files of classes, with their classes; log classes without images."""
    files = [(path, name) for name, paths in class_files.items() for path in paths if path in images]
    _refuse_splits(folder, files)
    if empty := sorted(set(class_files) - {name for _, name in files}):
        log.warning("%s; left out", describe_empty_classes(folder, empty, len(class_files)))
    return [(path, to_nfc(name)) for path, name in files]


def _refuse_splits(folder: Path, files: ClassifiedFiles) -> None:
    """Raise `DataError` if classes look like splits.

    A class with subfolders looks like a split if its name contains the name of a split, such as `seg_test`, or if all
    classes have the same two or more subfolders.
    """
    subfolders: dict[str, set[str]] = {name: set() for _, name in files}
    for path, name in files:
        subfolders[name].update(path.relative_to(folder / name).parts[:-1][:1])
    nested = [name for name, inner in subfolders.items() if inner]
    splits = [name for name in nested if not SPLIT_OF.keys().isdisjoint(re.findall("[a-z]+", name.lower()))]
    first, *others = subfolders.values() or [set()]
    if not splits and len(first) > 1 and all(inner == first for inner in others):
        splits = nested
    if splits:
        raise DataError(
            f"{folder}: folders of classes that look like splits: {join_names(splits)}, with the folders "
            f"{join_names(sorted(subfolders[splits[0]]))}; name splits train, val and test, with a folder for each "
            "class in each, or set data.dataset.labels=FILE.csv, which names the class of each image"
        )


def _take_test_split(files: ClassifiedFiles, test_share: float) -> tuple[ClassifiedFiles, ClassifiedFiles]:
    counts = Counter(name for _, name in files)
    # At least one image of each class stays for training.
    test_images_to_take = {name: min(round(count * test_share), count - 1) for name, count in counts.items()}
    train: ClassifiedFiles = []
    test: ClassifiedFiles = []
    for path, name in files:
        split = test if test_images_to_take[name] > 0 else train
        split.append((path, name))
        test_images_to_take[name] -= 1
    return train, test
