"""Lists the image files in folders."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitmnist.errors import DataError

log = logging.getLogger(__name__)

EXTENSIONS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2",
)  # fmt: skip
"""The file extensions of images. A file that this build of Pillow cannot read is reported as unreadable."""


def find_images(names: Sequence[str]) -> list[Path]:
    """The image files that names of files and folders stand for, each once, in this order.

    A file that does not exist is reported when it is read.

    Raises:
        DataError: a folder has no images.
    """
    images: list[Path] = []
    for path in map(Path, names):
        inside = select_images(list_files(path)) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
        images += inside
    return list(dict.fromkeys(images))


def list_files(folder: Path) -> list[Path]:
    """The regular files in a folder and its subfolders, sorted, without hidden ones.

    Links to folders are followed, but each folder is read once. A link to a missing file is included, so that the file
    is reported when it is read.
    """
    files: list[Path] = []
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real_path := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = visible_folders(Path(parent), folders)
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [path for path in paths if path.is_file() or not path.exists()]
    return sorted(files)


def visible_folders(parent: Path, names: Iterable[str]) -> list[str]:
    """The names of subfolders that are read, sorted: neither hidden ones nor links to `parent` or a folder above it.

    A linked parent folder would add the images of all classes to one class, so each such link is logged.
    """
    visible = sorted(name for name in names if not name.startswith("."))
    upward = [name for name in visible if parent.resolve().is_relative_to(Path(parent, name).resolve())]
    if upward:
        log.warning("%s: links to a parent folder are left out: %s", parent, ", ".join(upward))
    return [name for name in visible if name not in upward]


def select_images(files: Sequence[Path]) -> list[Path]:
    """The files with the extension of an image; the number of other files is logged by extension."""
    images = [path for path in files if path.name.lower().endswith(EXTENSIONS)]
    others = Counter(path.suffix.lower() for path in set(files).difference(images))
    if others:
        counts = ", ".join(f"{count} {extension or 'without'}" for extension, count in sorted(others.items()))
        log.warning("files left out by their endings: %s; pictures end in %s", counts, ", ".join(EXTENSIONS))
    return images
