"""Reads image files of any format, size and mode as uint8 pixels `[H, W, C]` of one size."""

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from vitmnist.errors import DataError

Pixels = NDArray[np.uint8]
"""The pixels of an image, `[H, W, C]` or `[H, W]`."""
ReadImage = Callable[[Path], Pixels | Image.Image]
"""A reader, such as an `ImageReader`: turns a file into uint8 `[H, W, C]` or a PIL image; raises `DataError`."""
PERMANENT_ERRNOS = (None, errno.ENOENT, errno.EACCES, errno.EISDIR)
"""Error numbers that mean an unreadable file; None is a decoder's error. Others, such as EIO, may be transient."""
TRANSPOSED = (5, 6, 7, 8)
"""The EXIF orientations of images whose rows are stored as columns."""


class ColorMode(str, Enum):
    """The channels to which images are converted; a dataset replaces `auto` by the mode that its images need."""

    grey = "grey"
    rgb = "rgb"
    auto = "auto"


class ResizeMode(str, Enum):
    """`stretch` distorts an image, `crop` resizes the shorter side and takes the centre, `pad` adds black margins."""

    stretch = "stretch"
    crop = "crop"
    pad = "pad"


@dataclass(frozen=True)
class ImageReader:
    """Reads image files as uint8 `[H, W, C]` of one size, upright; transparent pixels become white.

    Args:
        size: height and width.
        mode: the channels.
        resize: how an image of another aspect ratio is resized.
        draft: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice the size.
        max_16_bit: the 16-bit grey value that becomes white.
        range_32_bit: the int32 or float values that become black and white; None refuses such images.
    """

    size: tuple[int, int]
    mode: ColorMode
    resize: ResizeMode = ResizeMode.stretch
    draft: bool = False
    max_16_bit: int = 65_535
    range_32_bit: tuple[float, float] | None = None

    def __call__(self, path: Path, read_bytes: Callable[[Path], bytes] = lambda path: path.read_bytes()) -> Pixels:
        """Read a file, or what `read_bytes` returns for its path.

        Raises:
            DataError: the file is missing or damaged, or has an unknown format.
            OSError: a transient system error, such as too many open files.
        """
        try:
            # Do not use `np.fromfile`: it returns fewer bytes after a read error. Torch needs a writable buffer.
            return self.decode(np.frombuffer(bytearray(read_bytes(path)), np.uint8))
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders can raise any exception.
            if isinstance(error, OSError) and error.errno not in PERMANENT_ERRNOS:
                error.filename = str(path)
                raise
            reason = getattr(error, "strerror", None) or error  # Its full text would repeat the path.
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else reason
            raise DataError(f"{path}: cannot be read as an image: {reason}") from error

    def decode(self, content: Pixels) -> Pixels:
        """Decode and convert the content of a file, a writable array; can raise any exception."""
        with Image.open(BytesIO(content.data)) as image:
            return self.convert(image, decode=partial(_decode, content))

    def convert(self, image: Image.Image, decode: Callable[[Image.Image], Pixels] = np.array) -> Pixels:
        """Convert an image that is open but not loaded; `decode` returns its pixels at full size, as `np.array` does.

        Raises:
            ValueError: the pixels cannot be scaled to 8 bits.
        """
        orientation, size = self._stored_size(image)
        full_size = image.size
        # `draft` selects the scale of a JPEG, and returns its mode and the box that the full image covers.
        _, box = (image.draft(None, (2 * size[0], 2 * size[1])) if self.draft else None) or (None, None)
        is_scaled = image.size != full_size
        converted = self._convert_mode(image)
        # At scale 1/2, 375 rows are decoded to 188, not 187.5. Resizing all 188 would shift the image: at 64×64 the
        # pixels of 500×375 images would differ from full decoding by 1.2 instead of 0.3.
        if box and box != (0, 0, *converted.size):
            pixels = np.array(converted.resize(size, Image.Resampling.BILINEAR, box))
        else:
            pixels = np.array(converted) if is_scaled else decode(converted)  # Only Pillow decodes at a smaller scale.
            orientation, size = self._stored_size(image)  # Loading turns a TIFF image upright.
            pixels = resize_pixels(pixels, size)
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        return np.ascontiguousarray(self._crop_or_pad(_turn_upright(pixels, orientation)))

    def _stored_size(self, image: Image.Image) -> tuple[int, tuple[int, int]]:
        """Return the EXIF orientation of an image, and the (width, height) to resize it to before it is turned."""
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        height, width = self.size[::-1] if orientation in TRANSPOSED else self.size
        return orientation, fit_size(image.size, (width, height), self.resize)

    def _convert_mode(self, image: Image.Image) -> Image.Image:
        if image.mode[0] in "IF":
            image = self._scale_to_8_bit(image)
        if image.has_transparency_data:
            background = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(background, image.convert("RGBA"))
        mode = "L" if self.mode == ColorMode.grey else "RGB"
        # `convert` always copies, and holds the GIL meanwhile.
        return image if image.mode == mode else image.convert(mode)

    def _scale_to_8_bit(self, image: Image.Image) -> Image.Image:
        """Scale 16- or 32-bit pixels; Pillow would clip them at 255. A transparent grey value becomes white."""
        pixels = np.asarray(image).astype(np.float64)
        if not np.isfinite(pixels).all():
            raise ValueError("some of its pixels are not finite")
        # Pillow can open a 16-bit PNG or PGM file with mode I, which otherwise means 32 bits.
        is_32_bit = image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))
        if not (limits := self.range_32_bit if is_32_bit else (0, self.max_16_bit)):
            problem = f"its 32-bit pixels are {pixels.min():g} to {pixels.max():g}"
            raise ValueError(f"{problem}; training on such images needs data.dataset.range_32_bit=[BLACK,WHITE]")
        # In some TIFF files, 0 is white (PhotometricInterpretation). Pillow inverts only images of up to 8 bits.
        is_white_zero = getattr(image, "tag_v2", {}).get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) in (0, (0,))
        black, white = limits[::-1] if is_white_zero else limits
        scaled = ((pixels - black) * (255 / (white - black))).round().clip(0, 255)
        scaled[pixels == image.info.get("transparency", np.nan)] = 255
        return Image.fromarray(scaled.astype(np.uint8))

    def _crop_or_pad(self, pixels: Pixels) -> Pixels:
        (height, width), (rows, columns) = self.size, pixels.shape[:2]
        top, left = round((rows - height) / 2), round((columns - width) / 2)
        if self.resize == ResizeMode.crop:
            return pixels[top : top + height, left : left + width]
        if self.resize == ResizeMode.pad:
            return np.pad(pixels, ((-top, height - rows + top), (-left, width - columns + left), (0, 0)))
        return pixels


def _decode(content: Pixels, image: Image.Image) -> Pixels:
    """Decode the content of a file that Pillow has opened as `image`."""
    if image.format == "JPEG" and image.mode == "RGB":
        # Torchvision takes two thirds of Pillow's time, and releases the GIL. A build can lack the decoder. If it
        # fails, Pillow reports the damage, or continues with LOAD_TRUNCATED_IMAGES.
        with suppress(ImportError, RuntimeError):
            from torchvision.io import decode_jpeg  # This import takes 1.4 s.

            pixels: Tensor = decode_jpeg(torch.from_numpy(content), "RGB")
            return pixels.permute(1, 2, 0).numpy()
    return np.array(image)


def to_tensor(image: Image.Image | Pixels) -> Tensor:
    """Copy an image, or an array `[H, W]` or `[H, W, C]`, to a tensor `[C, H, W]`; uint8 for 8-bit modes."""
    pixels = np.array(image)  # Torchvision's pil_to_tensor would take 1.4 s to import.
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def fit_size(size: tuple[int, int], target: tuple[int, int], resize: str) -> tuple[int, int]:
    """Return the (width, height) to resize an image to: the target, or a size that covers it or fits into it."""
    if resize == ResizeMode.stretch:
        return target
    (width, height), (target_width, target_height) = size, target
    is_taller = height * target_width >= width * target_height  # than the target, in relation to its width
    if is_taller == (resize == ResizeMode.crop):  # The width determines the scale.
        return target_width, max(1, height * target_width // width)
    return max(1, width * target_height // height), target_height


def resize_pixels(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize pixels `[H, W]` or `[H, W, C]` to (width, height) with torch, in a third of Pillow's time.

    Pillow's `resize(size, Image.Resampling.BILINEAR)` differs by at most 1 of 255.
    """
    # `view` must come before `permute`. In the other order, torch does not detect that the channels are last in memory,
    # and takes two to three times as long.
    images = torch.from_numpy(pixels).view(1, *pixels.shape[:2], -1).permute(0, 3, 1, 2)
    return F.interpolate(images, size[::-1], mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


def _turn_upright(pixels: Pixels, orientation: int) -> Pixels:
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
