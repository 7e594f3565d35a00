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


def read_picture(path: Path, size: int, mode: Mode) -> Image.Image:
    """The picture in a file, upright, `size` × `size`, of mode L or RGB.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I"):  # 16 bits: Pillow would cut off at 255 what is brighter
                upright = Image.fromarray((np.asarray(upright).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
            converted = upright.convert("L" if mode == Mode.grey else "RGB")
            return converted.resize((size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise whatever their libraries do
        raise DataError(f"{path}: cannot be read as a picture: {error}") from error
