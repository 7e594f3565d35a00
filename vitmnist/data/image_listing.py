"""The images of a dataset or of a command line, listed by their paths before any is read."""

import hashlib
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from logging import INFO, WARNING, getLogger
from pathlib import Path

from vitmnist.data.images import ReadImage
from vitmnist.errors import DataError, join_names

log = getLogger(__name__)

EXTENSIONS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2",
)  # fmt: skip
"""The extensions of image files, the same on every machine. Files that the installed Pillow cannot read are errors."""
SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}
"""The splits, each with the names that its folder, or its rows in a table, can have."""
SPLIT_OF = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
"""The split of each name in `SPLITS`."""

to_nfc = partial(unicodedata.normalize, "NFC")
"""Composes the accents of a name (NFC): the names of files copied from macOS are decomposed (NFD)."""

ClassOfImage = dict[str, str]
"""The class of each image of a split, by the image's path relative to the dataset's folder."""
Remark = tuple[int, str]
"""What a listing leaves out or assumes, with the level at which it is logged."""


@dataclass(frozen=True)
class ImageListing:
    """The images of each split, before they are decoded.

    Args:
        folder: the folder that the paths of all images are relative to.
        splits: the images of each split, with their classes.
        read: reads an image by its path.
        containers: the files that contain the images, such as Parquet files; empty if each image is a file.
        folds: the fold of each training image, if any.
        class_order: the names of the classes in their order; None: sorted.
        remarks: logged if the images are decoded; listing alone logs nothing.
    """

    folder: Path
    splits: Mapping[str, ClassOfImage]
    read: ReadImage
    containers: Sequence[Path] = ()
    folds: Mapping[str, int] | None = None
    class_order: Sequence[str] | None = None
    remarks: Sequence[Remark] = ()

    def find_classes(self) -> list[str]:
        """Return the classes of the training images, in `class_order` or sorted.

        Raises:
            DataError: there are fewer than two, a split is empty, or it has a class without training images.
        """
        present = set(self.splits["train"].values())
        classes = [name for name in self.class_order or sorted(present) if name in present]
        if len(classes) < 2:
            raise DataError(
                f"{self.folder}: training images of two or more classes are expected, in {self.folder}/CLASS/ or by a "
                f"table of labels; found: {join_names(classes) or 'none'}"
            )
        for split, images in self.splits.items():
            if not images:
                raise DataError(f"{self.folder}: too few images for a {split} split")
            if unknown := sorted(set(images.values()).difference(classes)):
                raise DataError(
                    f"{self.folder}: the {split} split has classes without training images: {join_names(unknown)}; the "
                    f"classes of the training split are {join_names(classes)}; rename or remove these"
                )
        return classes


def find_images(names: Sequence[str]) -> list[Path]:
    """Expand the names of files and folders, and glob patterns, to image files: each once, in order.

    A file that does not exist is reported when it is read.

    Raises:
        DataError: a folder has no images, or a pattern has no match.
    """
    images: list[Path] = []
    remarks: list[Remark] = []
    for name in names:
        matches = [name] if not has_magic(name) or Path(name).exists() else sorted(glob(name, recursive=True))
        if not matches:
            raise DataError(f"{name}: matches no file")
        for path in map(Path, matches):
            inside = select_images(list_files(path), remarks) if path.is_dir() else [path]
            if not inside:
                raise DataError(f"{path}: holds no image ({', '.join(EXTENSIONS)})")
            images += inside
    for remark in remarks:
        log.log(*remark)
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
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [path for path in paths if path.is_file() or not path.exists()]
    return sorted(files)


def select_images(files: Sequence[Path], remarks: list[Remark]) -> list[Path]:
    """Return the files with the extension of an image, and remark on the number of other files by extension."""
    images = [path for path in files if path.name.lower().endswith(EXTENSIONS)]
    others = Counter(path.suffix.lower() for path in set(files).difference(images))
    if others:
        counts = ", ".join(f"{count} {extension or 'without'}" for extension, count in sorted(others.items()))
        remarks.append((WARNING, f"files left out by their endings: {counts}; images end in {', '.join(EXTENSIONS)}"))
    return images


def sort_by_hash(names: Iterable[str]) -> list[str]:
    """Sort images by a hash of their names. The order mixes the classes, and stays when images are added."""
    return sorted(names, key=lambda name: hashlib.sha256(os.fsencode(to_nfc(name))).digest())


def list_class_folders(folder: Path, read: ReadImage) -> ImageListing:
    """List the images of each split from folders of classes. Without folders of splits, all are training images.

    Raises:
        DataError: it is unclear which folders are splits.
    """
    splits: dict[str, ClassOfImage] = {}
    remarks: list[Remark] = []
    for split, parent in _find_split_folders(folder, remarks).items():
        images = select_images(list_files(parent), remarks)
        if stray := [path.name for path in images if path.parent == parent]:
            text = f"{parent}: images outside of the folders of classes are left out: {join_names(stray)}"
            remarks.append((WARNING, text))
        images = [path for path in images if path.parent != parent]
        classes = [to_nfc(path.relative_to(parent).parts[0]) for path in images]
        if empty := sorted({to_nfc(path.name) for path in _list_folders(parent)}.difference(classes)):
            remarks.append((WARNING, f"{parent}: folders without images are left out: {join_names(empty)}"))
        if parent == folder:
            _refuse_splits(folder, images)
        splits[split] = dict(zip((path.relative_to(folder).as_posix() for path in images), classes, strict=True))
    return ImageListing(folder, splits, read, remarks=remarks)


def _refuse_splits(folder: Path, images: Sequence[Path]) -> None:
    """Raise `DataError` if all classes have the same two or more subfolders, as splits with other names have."""
    subfolders: dict[str, set[str]] = defaultdict(set)
    for path in images:
        name, *inner = path.relative_to(folder).parts[:-1]
        subfolders[name].update(inner[:1])
    first, *others = subfolders.values() or [set[str]()]
    if len(first) > 1 and all(names == first for names in others):
        raise DataError(
            f"{folder}: {join_names(subfolders)} look like splits: each has the folders {join_names(sorted(first))}; "
            "name splits train, val and test, or set data.dataset.labels=FILE.csv, which names the class of each image"
        )


def _find_split_folders(folder: Path, remarks: list[Remark]) -> dict[str, Path]:
    """Return the folder of each split in the order of `SPLITS`; `folder` itself if it contains folders of classes.

    The folder of a split has a word of `SPLITS` in its name, as in `training_set`. Since a class can have such a name
    too, at least one must contain folders.
    """
    subfolders = _list_folders(folder)
    words = {path: re.findall("[a-z]+", path.name.lower()) for path in subfolders}
    named = [(SPLIT_OF[word], path) for path in subfolders for word in words[path] if word in SPLIT_OF]
    if not any(_list_folders(path) for _, path in named):
        return {"train": folder}
    by_split = dict(named)
    # A folder such as `train_val` would be two splits.
    if len(named) != len(by_split) or len({path for _, path in named}) < len(named) or "train" not in by_split:
        raise DataError(
            f"{folder}: the folders of splits must be one train and at most one val and test, each with a folder for "
            f"each class; found {join_names(path.name for _, path in named)}; rename or remove some, or set "
            "data.dataset.labels=FILE.csv, which names the class of each image"
        )
    folders = {split: by_split[split] for split in SPLITS if split in by_split}
    sources = ", ".join(f"{split} split from {path.name}" for split, path in folders.items())
    remarks.append((INFO, f"{folder}: {sources}"))
    others = [path for path in subfolders if path not in folders.values()]
    if len(folders) == 1 and any(select_images(list_files(path), remarks) for path in others):
        raise DataError(
            f"{folder}: it is unclear whether {folders['train'].name} is a split or a class next to "
            f"{join_names(path.name for path in others)}; name splits train, val and test, or move the others away"
        )
    if others:
        remarks.append((WARNING, f"{folder}: not used: {join_names(path.name for path in others)}"))
    return folders


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
