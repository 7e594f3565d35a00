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
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from vitmnist.errors import DataError, printable

# As torchvision.datasets.ImageFolder; importing that module takes 2 s.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
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
        with Image.open(path) as image:
            box = _draft(image, size) if draft else None
            # In place, and converted only if necessary: a copy holds Python's lock, for which other threads wait.
            ImageOps.exif_transpose(image, in_place=True)
            upright: Image.Image = image
            if upright.mode[0] in "IF":
                upright = _to_8_bit(upright)
            if upright.has_transparency_data:
                background = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(background, upright.convert("RGBA"))
            target = "L" if mode == Mode.grey else "RGB"
            converted = upright if upright.mode == target else upright.convert(target)
            if box and box != (0, 0, *converted.size):
                return converted.resize(size, Image.Resampling.BILINEAR, box)
            return _resized(converted, size)
    except Exception as error:  # Pillow's decoders raise the errors of many libraries
        reason = getattr(error, "strerror", None) or error  # of a missing file, without its number and name
        raise DataError(f"{printable(path)}: cannot be read as a picture: {reason}") from error


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image resized to (width, height) by torch, in a third of Pillow's time; pixels differ by at most 1 of 255."""
    pixels = F.interpolate(to_tensor(image)[None], size[::-1], mode="bilinear", antialias=True)[0]
    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels `[C, H, W]` of an image, a copy; uint8 for 8-bit modes."""
    # As torchvision's pil_to_tensor; importing that takes 2 s.
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)


def is_colour(path: Path, draft: bool = False) -> bool:
    """Whether an image shows colour; many grey ones are stored with three channels. `draft` as in `read_picture`."""
    pixels = np.asarray(read_picture(path, (64, 64), Mode.rgb, draft))
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


def _draft(image: Image.Image, size: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """Choose the scale of a JPEG for a target of (width, height); the part of the upright image that it fills.

    None for other formats, which are decoded in full.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    is_turned = orientation in (5, 6, 7, 8)
    width, height = size[::-1] if is_turned else size
    drafted = image.draft(None, (2 * width, 2 * height))  # None: the mode stays
    if drafted is None:
        return None
    # 375 rows at half the scale are 187.5 of 188: as 188, pictures of 500×375 differ at 64×64 by 1.2 from full decoding
    # in place of 0.3.
    (outer_width, outer_height), (_, _, inner_width, inner_height) = image.size, drafted[1]
    if is_turned:
        outer_width, outer_height, inner_width, inner_height = outer_height, outer_width, inner_height, inner_width
    left = outer_width - inner_width if orientation in (2, 3, 6, 7) else 0
    top = outer_height - inner_height if orientation in (3, 4, 7, 8) else 0
    return left, top, left + inner_width, top + inner_height


def _to_8_bit(image: Image.Image) -> Image.Image:
    """An image of 16 or 32 bits, which Pillow would clip at 255, scaled by the range of its values."""
    pixels = np.asarray(image).astype(np.float64)
    if image.mode.startswith("I;16") or pixels.max() > 255:
        pixels /= 257  # 65,535 is white
    elif image.mode == "F" and pixels.max() <= 1:
        pixels *= 255
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
