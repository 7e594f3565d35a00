"""From an image file of any format, size and mode to uint8 pixels `[H, W, C]` of one size."""

from __future__ import annotations

import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.store.rows import is_large

Pixels = NDArray[np.uint8]

MAX_SIDE = 65_535
"""The longest side of a picture, also after resizing, as of a JPEG file; to resize a longer one takes gigabytes."""
_reading = threading.local()
"""Its attribute `path` is the file that the current thread reads."""


class Mode(str, Enum):
    """The channels that images are converted to."""

    grey = "grey"
    rgb = "rgb"


class Resize(str, Enum):
    """How an image of any shape becomes square; see `to_pixels`."""

    stretch = "stretch"
    crop = "crop"
    pad = "pad"


@dataclass(frozen=True)
class ImageReader:
    """Reads a file of any size and mode as uint8 `[H, W, C]`, by `to_pixels`, whose arguments these are."""

    size: tuple[int, int]
    mode: Mode
    resize: Resize = Resize.stretch
    draft: bool = False
    max_16_bit: int = 65_535
    range_32_bit: tuple[float, float] | None = None

    def __call__(self, path: Path) -> Pixels:
        """Raises `DataError` if the file cannot be read."""
        _reading.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError("not a regular file")  # Opening a named pipe would wait for a writer.
            content = np.fromfile(path, np.uint8)
            with Image.open(BytesIO(content.data)) as opened:
                return to_pixels(opened, **vars(self), decode=partial(_decode, content))
        except Exception as error:  # Pillow's decoders raise the errors of many libraries
            reason = getattr(error, "strerror", None) or error  # The error of a missing file repeats its name.
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else reason
            raise DataError(f"{path}: cannot be read as a picture: {reason}") from error
        finally:
            _reading.path = None


@contextmanager
def file_warnings() -> Iterator[dict[Path, str]]:
    """Collect a warning of Pillow for each file that any thread reads, in place of printing it without the file."""
    collected: dict[Path, str] = {}

    def collect(message: Warning | str, *parts: Any, **options: Any) -> None:
        if path := getattr(_reading, "path", None):
            collected[path] = str(message)
        else:
            show(message, *parts, **options)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", module="PIL", append=True)  # Filters of the user come first.
        show, warnings.showwarning = warnings.showwarning, collect
        yield collected


def _decode(content: Pixels, image: Image.Image) -> Pixels:
    """The pixels of a file with this content, which Pillow has opened as `image`."""
    if image.format == "JPEG" and image.mode == "RGB" and (decode_jpeg := _jpeg_decoder()):
        with suppress(RuntimeError):  # Pillow names the damage, or reads on with LOAD_TRUNCATED_IMAGES
            return decode_jpeg(content)
    return np.array(image)


@cache
def _jpeg_decoder() -> Callable[[Pixels], Pixels] | None:
    """torchvision's decoder: bytes of a file to `[H, W, 3]`; None without it, or if its pixels are not Pillow's.

    It takes two thirds of Pillow's time, and does not hold Python's lock.
    """
    written = BytesIO()  # Builds of libjpeg differ in how they round and enlarge colours.
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (21, 37, 3), np.uint8)).save(written, "JPEG")
    try:
        from torchvision.io import decode_jpeg  # This takes 1.4 s, or 0.1 s where there is an optimizer.

        def decode(content: Pixels) -> Pixels:
            pixels: Tensor = decode_jpeg(torch.from_numpy(content), "RGB")
            return pixels.permute(1, 2, 0).numpy()

        is_equal = np.array_equal(decode(np.frombuffer(written.getbuffer(), np.uint8)), np.array(Image.open(written)))
    # torchvision 0.29 says that a later release lacks the function; RuntimeError: it was built without libjpeg.
    except (ImportError, RuntimeError, DeprecationWarning):
        return None
    return decode if is_equal else None


def to_tensor(image: Image.Image | Pixels) -> Tensor:
    """The pixels `[C, H, W]` of an image or of an array `[H, W]` or `[H, W, C]`, a copy; uint8 for 8-bit modes."""
    pixels = np.array(image)  # Importing torchvision's pil_to_tensor takes 1.4 s.
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def empty_images(count: int, channels: int, height: int, width: int, *, pin_memory: bool = False) -> Tensor:
    """Uninitialised uint8 `[N, C, H, W]` on the host; large images have their channels last in memory.

    Decoders deliver them so, and torch resizes and mirrors bytes with vector code only then.
    """
    layout = torch.channels_last if is_large((height, width)) else torch.contiguous_format
    shape = count, channels, height, width
    return torch.empty(shape, dtype=torch.uint8, device="cpu", memory_format=layout, pin_memory=pin_memory)


def to_pixels(
    opened: Image.Image,
    size: tuple[int, int],
    mode: str,
    resize: str,
    draft: bool,
    max_16_bit: int = 65_535,
    range_32_bit: tuple[float, float] | None = None,
    decode: Callable[[Image.Image], NDArray[np.uint8]] = np.array,
) -> NDArray[np.uint8]:
    """The pixels of an opened image, upright, uint8 `[H, W, C]` of (width, height); transparent ones become white.

    Args:
        mode: grey or rgb.
        resize: stretch; crop: the shorter side fits, the centre is taken; pad: the longer side fits, the rest is black.
        draft: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice the size.
        max_16_bit: the value of 16-bit pixels that becomes white.
        range_32_bit: the values of int32 and float pixels that become black and white; None: they are refused.
        decode: makes uint8 `[H, W]` or `[H, W, C]` of an image at scale 1; the same pixels as `np.array`.
    """
    scale_transparency(opened)
    (orientation, to_size), full_size = stored_size(opened, size, resize), opened.size
    drafted = opened.draft(None, (2 * to_size[0], 2 * to_size[1])) if draft else None
    if opened.size != full_size:
        decode = np.array
    image: Image.Image = opened
    if image.mode[0] in "IF":
        image = to_8_bit(image, max_16_bit, range_32_bit)
    elif tiff_tag(image, 339) == 2:  # The tag SampleFormat says that they are signed.
        raise ValueError("its pixels are signed 8-bit integers, which Pillow reads as unsigned")
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image.convert("RGBA"))
    target = "L" if mode == "grey" else "RGB"
    if image.mode != target:  # A copy holds Python's lock, and other threads wait for it.
        image = image.convert(target)
    # Half of 375 rows is 187.5, stored as 188. Resized from all 188, images of 500×375 differ from full
    # decoding by 1.2 at 64×64, instead of 0.3.
    if drafted and drafted[1] != (0, 0, *image.size):
        pixels = np.array(image.resize(to_size, Image.Resampling.BILINEAR, drafted[1]))
        pixels = pixels.reshape(*pixels.shape[:2], -1)
    else:
        pixels = decode(image)
        orientation, to_size = stored_size(opened, size, resize)  # Pillow's TIFF reader has now turned it upright.
        pixels = resized(pixels, to_size)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    top, left = (round((side - to) / 2) for side, to in zip(pixels.shape[:2], size[::-1], strict=True))
    if resize == "crop":
        pixels = pixels[top : top + size[1], left : left + size[0]]
    if resize == "pad":
        bottom, right = (to - side for side, to in zip(pixels.shape[:2], size[::-1], strict=True))
        pixels = np.pad(pixels, ((-top, bottom + top), (-left, right + left), (0, 0)))
    return np.ascontiguousarray(pixels)


def stored_size(opened: Image.Image, size: tuple[int, int], resize: str) -> tuple[int, tuple[int, int]]:
    """The EXIF orientation of an image, and the size to which it is resized before it is turned upright."""
    orientation = opened.getexif().get(ExifTags.Base.Orientation, 1)
    to_size = fitted(opened.size, size[::-1] if orientation in (5, 6, 7, 8) else size, resize)
    if max(*opened.size, *to_size) > MAX_SIDE:
        raise ValueError(f"{opened.width}×{opened.height} pixels: a side is, or would become, longer than {MAX_SIDE}")
    return orientation, to_size


def fitted(size: tuple[int, int], to: tuple[int, int], resize: str) -> tuple[int, int]:
    """The (width, height) to which an image is resized: `to`, or as large as it covers `to` or fits into it."""
    if resize == "stretch":
        return to
    (width, height), (to_width, to_height) = size, to
    if (height * to_width >= width * to_height) == (resize == "crop"):
        return to_width, max(1, height * to_width // width)
    return max(1, width * to_height // height), to_height


def resized(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixels uint8 `[H, W]` or `[H, W, C]`, resized to (width, height) by torch, in a third of Pillow's time.

    Pillow's own `resize(size, Image.Resampling.BILINEAR)` differs by at most 1 of 255.
    """
    # First a batch, then channels first: the other way round torch does not see that the channels are last in memory,
    # and takes two to three times as long.
    images = torch.from_numpy(pixels).view(1, *pixels.shape[:2], -1).permute(0, 3, 1, 2)
    return F.interpolate(images, size[::-1], mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


def to_8_bit(image: Image.Image, max_16_bit: int, range_32_bit: tuple[float, float] | None) -> Image.Image:
    """A grey image of 16 or 32 bits, which Pillow would clip at 255; white where a 16-bit PNG is transparent."""
    pixels = np.asarray(image).astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("some of its pixels are not finite")
    if image.mode == "I" and tiff_tag(image, 339, 1) == 1 and pixels.min() < 0:  # SampleFormat says unsigned.
        raise ValueError("some of its uint32 pixels are above 2147483647, which Pillow reads as negative")
    # Pillow gives the 16-bit pixels of PNG and PGM files as int32.
    is_32_bit = image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))
    if not (limits := range_32_bit if is_32_bit else (0, max_16_bit)):
        problem = f"its 32-bit pixels are {pixels.min():g} to {pixels.max():g}"
        raise ValueError(f"{problem}; training on such pictures needs data.dataset.range_32_bit=[BLACK,WHITE]")
    # Pillow inverts TIFF files of up to 8 bits in which 0 is white (PhotometricInterpretation), and no others.
    black, white = limits[::-1] if tiff_tag(image, 262) == 0 else limits
    scaled = ((pixels - black) * (255 / (white - black))).round().clip(0, 255)
    scaled[pixels == image.info.get("transparency", np.nan)] = 255
    return Image.fromarray(scaled.astype(np.uint8))


def tiff_tag(image: Image.Image, tag: int, default: int | None = None) -> int | None:
    """The value of a tag, the first if it has several; `default` if it is missing or the file is no TIFF."""
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return value[0] if isinstance(value, tuple) else value


def scale_transparency(opened: Image.Image) -> None:
    """Scale the transparent value of a PNG file that is not loaded, as Pillow scales its pixels of 2, 4 and 16 bits."""
    for *_, stored in getattr(opened, "tile", ()) if "transparency" in opened.info else ():
        if factor := {"L;2": 85, "L;4": 17}.get(stored):
            opened.info["transparency"] *= factor
        elif stored == "RGB;16B":  # Pillow keeps the upper 8 bits.
            opened.info["transparency"] = tuple(value >> 8 for value in opened.info["transparency"])
