"""Finding picture files, and reading one, of any size and mode."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from glob import glob, has_magic
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitmnist.errors import DataError

ENDINGS = IMG_EXTENSIONS
TINTED = 32  # how far the channels of a pixel are apart where it is seen to be in colour


class Mode(str, Enum):
    """The channels that pictures are converted to."""

    grey = "grey"
    rgb = "rgb"


def read_picture(path: Path, size: tuple[int, int], mode: Mode) -> Image.Image:
    """The picture in a file, upright, `size` (width, height) large, of mode L or RGB; what is transparent is white.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.mode[0] in "IF":
                upright = _in_bytes(upright)
            if upright.has_transparency_data:
                page = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(page, upright.convert("RGBA"))
            converted = upright.convert("L" if mode == Mode.grey else "RGB")
            return converted.resize(size, Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise whatever their libraries do
        raise DataError(f"{printable(path)}: cannot be read as a picture: {error}") from error


def is_colour(path: Path) -> bool:
    """Whether a picture shows colour; many grey ones are stored with three channels. Raises as `read_picture`."""
    pixels = np.asarray(read_picture(path, (64, 64), Mode.rgb))
    return bool(np.ptp(pixels, axis=2).max() > TINTED)


def find_pictures(names: Sequence[str]) -> list[Path]:
    """The pictures that files, folders and glob patterns name, each once, in this order.

    Of a folder, and the folders in it, the files with one of `ENDINGS`, sorted; a pattern's matches are sorted too.

    Raises:
        DataError: a folder without pictures, or a pattern without a match; names it.
    """
    found: list[Path] = []
    for name in names:
        if not has_magic(name) or Path(name).exists():
            found += _pictures_at(Path(name))
        elif matches := sorted(glob(name, recursive=True)):
            found += [path for match in matches for path in _pictures_at(Path(match))]
        else:
            raise DataError(f"{printable(name)}: matches no file")
    return list(dict.fromkeys(found))


def _pictures_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]  # one that is not there is named when it is read
    inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
    if not inside:
        raise DataError(f"{printable(path)}: holds no picture ({', '.join(ENDINGS)})")
    return inside


def printable(name: str | Path) -> str:
    """A file's name as text, which it need not be."""
    return os.fsencode(name).decode(errors="replace")


def _in_bytes(picture: Image.Image) -> Image.Image:
    """A picture of 16 or 32 bits, which Pillow would cut off at 255, scaled by the range that its values are in."""
    pixels = np.asarray(picture).astype(np.float64)
    if picture.mode.startswith("I;16") or pixels.max() > 255:
        pixels /= 257  # 65,535 is white
    elif picture.mode == "F" and pixels.max() <= 1:
        pixels *= 255
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
