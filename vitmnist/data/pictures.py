"""Reading one picture file, of any size and mode."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vitmnist.errors import DataError


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
        name = str(path).encode(errors="replace").decode()  # a name need not be text
        raise DataError(f"{name}: cannot be read as a picture: {error}") from error


def _in_bytes(picture: Image.Image) -> Image.Image:
    """A picture of 16 or 32 bits, which Pillow would cut off at 255, scaled by the range that its values are in."""
    pixels = np.asarray(picture).astype(np.float64)
    if picture.mode.startswith("I;16") or pixels.max() > 255:
        pixels /= 257  # 65,535 is white
    elif picture.mode == "F" and pixels.max() <= 1:
        pixels *= 255
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
