"""Makes an image of one size and mode of a picture file, as the model was trained on it.

Model cards quote this file, so it imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

PHOTOMETRIC, SAMPLE_FORMAT, UNSIGNED, SIGNED = 262, 339, 1, 2  # tags of TIFF files, and values of the latter
MAX_SIDE = 65_535  # in pixels, as of a JPEG file; to resize a longer side takes seconds


def to_image(
    opened: Image.Image,
    size: tuple[int, int],
    mode: str,
    resize: str,
    draft: bool,
    max_16_bit: int = 65_535,
    range_32_bit: tuple[float, float] | None = None,
    decode: Callable[[Image.Image], NDArray[np.uint8]] = np.array,
) -> Image.Image:
    """An opened picture, upright, of (width, height); transparent pixels become white.

    Args:
        mode: grey or rgb.
        resize: stretch; crop: the shorter side fits, the centre is taken; pad: the longer side fits, the rest is black.
        draft: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice the size.
        max_16_bit: the value of 16-bit pixels that becomes white.
        range_32_bit: the values of int32 and float pixels that become black and white; None: they are refused.
        decode: makes uint8 `[H, W]` or `[H, W, C]` of an image; the same pixels as `np.array`, perhaps sooner.
    """
    scale_transparency(opened)
    orientation, to_size = stored_size(opened, size, resize)
    drafted = opened.draft(None, (2 * to_size[0], 2 * to_size[1])) if draft else None
    image: Image.Image = opened
    if image.mode[0] in "IF":
        image = to_8_bit(image, max_16_bit, range_32_bit)
    elif tiff_tag(image, SAMPLE_FORMAT) == SIGNED:
        raise ValueError("its pixels are signed 8-bit integers, which Pillow reads as unsigned")
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image.convert("RGBA"))
    target = "L" if mode == "grey" else "RGB"
    if image.mode != target:  # a copy holds Python's lock, for which other threads wait
        image = image.convert(target)
    # Half of 375 rows is 187.5, stored as 188. Resized from all 188, pictures of 500×375 differ from full
    # decoding by 1.2 at 64×64, instead of 0.3.
    if drafted and drafted[1] != (0, 0, *image.size):
        image = image.resize(to_size, Image.Resampling.BILINEAR, drafted[1])
    else:
        pixels = decode(image)
        orientation, to_size = stored_size(opened, size, resize)  # by now Pillow's TIFF reader has turned it upright
        image = resized(pixels, to_size)
    if orientation != 1:
        image.getexif()[ExifTags.Base.Orientation] = orientation
        image = ImageOps.exif_transpose(image)
    left, top = (round((side - to) / 2) for side, to in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1])) if image.size != size else image  # or pads with black


def stored_size(opened: Image.Image, size: tuple[int, int], resize: str) -> tuple[int, tuple[int, int]]:
    """The EXIF orientation of a picture, and the size to which it is resized before it is turned upright."""
    orientation = opened.getexif().get(ExifTags.Base.Orientation, 1)
    to_size = fitted(opened.size, size[::-1] if orientation in (5, 6, 7, 8) else size, resize)
    if max(*opened.size, *to_size) > MAX_SIDE:
        raise ValueError(f"{opened.width}×{opened.height} pixels are more than {MAX_SIDE} on a side")
    return orientation, to_size


def fitted(size: tuple[int, int], to: tuple[int, int], resize: str) -> tuple[int, int]:
    """The (width, height) to which a picture is resized: `to`, or as large as it covers `to` or fits into it."""
    if resize == "stretch":
        return to
    (width, height), (to_width, to_height) = size, to
    if (height * to_width >= width * to_height) == (resize == "crop"):
        return to_width, max(1, height * to_width // width)
    return max(1, width * to_height // height), to_height


def resized(pixels: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    """An image of uint8 `[H, W]` or `[H, W, C]`, resized to (width, height) by torch, in a third of Pillow's time.

    Pillow's own `resize(size, Image.Resampling.BILINEAR)` differs by at most 1 of 255.
    """
    # First a batch, then channels first: the other way round torch does not see that the channels are last in memory,
    # and takes two to three times as long, with the copy to an image.
    images = torch.from_numpy(pixels).view(1, *pixels.shape[:2], -1).permute(0, 3, 1, 2)
    images = F.interpolate(images, size[::-1], mode="bilinear", antialias=True)
    return Image.fromarray(images[0].permute(1, 2, 0).squeeze(2).numpy())


def to_8_bit(image: Image.Image, max_16_bit: int, range_32_bit: tuple[float, float] | None) -> Image.Image:
    """A grey image of 16 or 32 bits, which Pillow would clip at 255; white where a 16-bit PNG is transparent."""
    pixels = deep_pixels(image)
    if not (limits := range_32_bit if is_32_bit(image) else (0, max_16_bit)):
        raise ValueError("int32 and float pixels need data.dataset.range_32_bit=[BLACK,WHITE] in training")
    # Pillow inverts TIFF files of up to 8 bits in which 0 is white, and no others.
    low, high = limits[::-1] if tiff_tag(image, PHOTOMETRIC) == 0 else limits
    scaled = ((pixels - low) * (255 / ((high - low) or 1))).round().clip(0, 255)
    scaled[pixels == image.info.get("transparency", np.nan)] = 255
    return Image.fromarray(scaled.astype(np.uint8))


def deep_pixels(image: Image.Image) -> NDArray[np.float64]:
    """The pixels of a grey image of 16 or 32 bits; raises `ValueError` if Pillow cannot tell all of them."""
    pixels = np.asarray(image).astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("some of its pixels are not finite")
    if image.mode == "I" and tiff_tag(image, SAMPLE_FORMAT, UNSIGNED) == UNSIGNED and pixels.min() < 0:
        raise ValueError("some of its uint32 pixels are above 2147483647, which Pillow reads as negative")
    return pixels


def tiff_tag(image: Image.Image, tag: int, default: int | None = None) -> int | None:
    """The value of a tag, the first if it has several; `default` if it is missing or the file is no TIFF."""
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return value[0] if isinstance(value, tuple) else value


def scale_transparency(opened: Image.Image) -> None:
    """Scale the transparent value of a PNG file that is not loaded, as Pillow scales its pixels of 2, 4 and 16 bits."""
    for *_, stored in getattr(opened, "tile", ()) if "transparency" in opened.info else ():
        if factor := {"L;2": 85, "L;4": 17}.get(stored):
            opened.info["transparency"] *= factor
        elif stored == "RGB;16B":  # of which Pillow keeps the upper 8 bits
            opened.info["transparency"] = tuple(value >> 8 for value in opened.info["transparency"])


def is_32_bit(image: Image.Image) -> bool:
    """Whether an image has int32 or float pixels; Pillow gives those of 16-bit PGM files as int32, up to 65,535."""
    return image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))
