"""Makes an image of one size and mode of a picture file, as the model was trained on it.

Model cards quote this file, so it imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import ExifTags, Image

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


def to_image(
    opened: Image.Image,
    size: tuple[int, int],
    mode: str,
    resize: str,
    draft: bool,
    decode: Callable[[Image.Image], NDArray[np.uint8]] = np.array,
) -> Image.Image:
    """An opened picture, upright, of (width, height); transparent pixels become white.

    Args:
        mode: grey or rgb.
        resize: stretch; crop: the shorter side fits, the centre is taken; pad: the longer side fits, the rest is black.
        draft: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice the size.
        decode: makes uint8 `[H, W]` or `[H, W, C]` of an image; the same pixels as `np.array`, perhaps sooner.
    """
    orientation = opened.getexif().get(ExifTags.Base.Orientation)
    to_size = fitted(opened.size, size[::-1] if orientation in (5, 6, 7, 8) else size, resize)
    if max(*opened.size, *to_size) > MAX_SIDE:
        raise ValueError(f"{opened.width}×{opened.height} pixels are more than {MAX_SIDE} on a side")
    drafted = opened.draft(None, (2 * to_size[0], 2 * to_size[1])) if draft else None
    image: Image.Image = opened
    if image.mode[0] in "IF":
        image = to_8_bit(image)
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
        image = resized(decode(image), to_size)
    if orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[orientation])
    left, top = (round((side - to) / 2) for side, to in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1])) if image.size != size else image  # or pads with black


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


def to_8_bit(image: Image.Image) -> Image.Image:
    """An image of 16 or 32 bits, which Pillow would clip at 255, scaled by the range of its values."""
    pixels = np.asarray(image).astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("some of its pixels are not finite")
    if image.mode.startswith("I;16") or pixels.max() > 255:
        pixels /= 257  # 65,535 is white
    elif image.mode == "F" and pixels.max() <= 1:
        pixels *= 255
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
