"""Finds image files, and reads one of any size and mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from enum import Enum
from glob import glob, has_magic
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from torch import Tensor

from vitmnist.errors import DataError, printable

# As torchvision.datasets.ImageFolder; importing that module takes 2 s.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
UPRIGHT = {  # how an image of an EXIF orientation is turned
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MAX_SIDE = 65_535  # in pixels, as of a JPEG file; to resize a longer side takes seconds
COLOUR_THRESHOLD = 32  # difference between the channels of a pixel from which it counts as coloured


class Mode(str, Enum):
    """The channels that images are converted to."""

    grey = "grey"
    rgb = "rgb"


def read_picture(path: Path, size: tuple[int, int], mode: Mode, draft: bool = False) -> Image.Image:
    """The image in a file, upright, resized to (width, height), of mode L or RGB; transparent pixels become white.

    Args:
        draft: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice `size`.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a regular file")  # opening a FIFO would wait for a writer
        with Image.open(path) as opened:
            if max(opened.size) > MAX_SIDE:
                raise ValueError(f"{opened.width}×{opened.height} pixels are more than {MAX_SIDE} on a side")
            orientation = opened.getexif().get(ExifTags.Base.Orientation)
            stored_size = size[::-1] if orientation in (5, 6, 7, 8) else size
            drafted = opened.draft(None, (2 * stored_size[0], 2 * stored_size[1])) if draft else None
            image: Image.Image = opened
            if image.mode[0] in "IF":
                image = _to_8_bit(image)
            if image.has_transparency_data:
                background = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(background, image.convert("RGBA"))
            target = "L" if mode == Mode.grey else "RGB"
            if image.mode != target:  # a copy holds Python's lock, for which other threads wait
                image = image.convert(target)
            # Half of 375 rows is 187.5, stored as 188. Resized from all 188, pictures of 500×375 differ from full
            # decoding by 1.2 at 64×64, instead of 0.3.
            if drafted and drafted[1] != (0, 0, *image.size):
                resized = image.resize(stored_size, Image.Resampling.BILINEAR, drafted[1])
            else:
                resized = _resized(image, stored_size)
            return resized.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else resized
    except Exception as error:  # Pillow's decoders raise the errors of many libraries
        reason = getattr(error, "strerror", None) or error  # of a missing file, without its number and name
        raise DataError(f"{printable(path)}: cannot be read as a picture: {reason}") from error


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image resized to (width, height) by torch, in a third of Pillow's time; pixels differ by at most 1 of 255."""
    pixels = F.interpolate(to_tensor(image)[None], size[::-1], mode="bilinear", antialias=True)[0]
    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())


def has_alpha(path: Path) -> bool:
    """Whether an image has transparent pixels, which become white. Raises `OSError` if it cannot be opened."""
    with Image.open(path) as image:
        least, _ = image.convert("RGBA").getchannel("A").getextrema()
        return image.has_transparency_data and least != 255


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels `[C, H, W]` of an image, a copy; uint8 for 8-bit modes."""
    # As torchvision's pil_to_tensor; importing that takes 2 s.
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)


def is_colour(path: Path) -> bool:
    """Whether an image shows colour; many grey ones are stored with three channels."""
    pixels = np.asarray(read_picture(path, (64, 64), Mode.rgb, draft=True))
    return bool(np.ptp(pixels, axis=2).max() > COLOUR_THRESHOLD)


def find_pictures(names: Sequence[str]) -> list[Path]:
    """The image files that files, folders and glob patterns name, each once, in this order.

    Raises:
        DataError: a folder without images, or a pattern without a match; names it.
    """
    found: list[Path] = []
    for name in names:
        matches = [name] if not has_magic(name) or Path(name).exists() else sorted(glob(name, recursive=True))
        if not matches:
            raise DataError(f"{printable(name)}: matches no file")
        for path in map(Path, matches):
            # A file that does not exist is named when it is read.
            inside = list_images(path) if path.is_dir() else [path]
            if not inside:
                raise DataError(f"{printable(path)}: holds no picture ({', '.join(EXTENSIONS)})")
            found += inside
    return list(dict.fromkeys(found))


def list_images(folder: Path) -> list[Path]:
    """The pictures in a folder and its subfolders, sorted.

    Only regular files are pictures; a link to a missing one counts, and is named when it is read. Links to folders are
    followed, each folder once: links that form a loop would never end.
    """
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = sorted(name for name in folders if os.path.realpath(os.path.join(parent, name)) not in seen)
        paths = [Path(parent, name) for name in names]
        found += [path for path in paths if is_picture(path) and (os.path.isfile(path) or not os.path.exists(path))]
    return sorted(found)


def is_picture(path: Path) -> bool:
    """Whether the name is that of a picture: one of `EXTENSIONS`, and not hidden, as the `._NAME` of macOS are."""
    return path.name.lower().endswith(EXTENSIONS) and not path.name.startswith(".")


def _to_8_bit(image: Image.Image) -> Image.Image:
    """An image of 16 or 32 bits, which Pillow would clip at 255, scaled by the range of its values."""
    pixels = np.asarray(image).astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("some of its pixels are not finite")
    if image.mode.startswith("I;16") or pixels.max() > 255:
        pixels /= 257  # 65,535 is white
    elif image.mode == "F" and pixels.max() <= 1:
        pixels *= 255
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
