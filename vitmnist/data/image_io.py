"""Finds image files, and reads one of any size and mode."""

from __future__ import annotations

import logging
import os
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from glob import glob, has_magic
from importlib.machinery import PathFinder
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitmnist.data.picture import deep_pixels, is_32_bit, scale_transparency, to_image
from vitmnist.errors import DataError, printable

# The same with every build of Pillow: what it cannot read is reported as unreadable.
JPEG = ".jpg", ".jpeg", ".jfif"
EXTENSIONS = (*JPEG, ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2")
IMAGE_READ_MODE_RGB = 3  # torchvision.io.ImageReadMode.RGB
COLOUR_THRESHOLD = 32  # difference between the channels of a pixel from which it counts as coloured

log = logging.getLogger(__name__)
_reading = threading.local()  # `path`: the file that a thread reads

Pixels = NDArray[np.uint8]


class Mode(str, Enum):
    """The channels that images are converted to."""

    grey = "grey"
    rgb = "rgb"


class Resize(str, Enum):
    """How a picture of any shape becomes square; see `vitmnist.data.picture`."""

    stretch = "stretch"
    crop = "crop"
    pad = "pad"


@dataclass(frozen=True)
class PictureReader:
    """Makes an image of a file of any size and mode, by `to_image`, whose arguments these are."""

    size: tuple[int, int]
    mode: Mode
    resize: Resize = Resize.stretch
    draft: bool = False
    max_16_bit: int = 65_535
    range_32_bit: tuple[float, float] | None = None

    def __call__(self, path: Path) -> Image.Image:
        """Raises `DataError` if the file cannot be read."""
        with open_picture(path) as opened:
            return to_image(opened, **vars(self), decode=_decode)


@contextmanager
def open_picture(path: Path) -> Iterator[Image.Image]:
    """A picture file, to be read inside the context; raises `DataError` if that fails."""
    _reading.path = path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a regular file")  # opening a FIFO would wait for a writer
        with Image.open(path) as opened:
            yield opened
    except Exception as error:  # Pillow's decoders raise the errors of many libraries
        reason = getattr(error, "strerror", None) or error  # of a missing file, without its number and name
        raise DataError(f"{printable(path)}: cannot be read as a picture: {reason}") from error
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
        warnings.filterwarnings("always", module="PIL", append=True)  # after filters of the user
        show, warnings.showwarning = warnings.showwarning, collect
        yield collected


def _decode(image: Image.Image) -> Pixels:
    """The pixels of an image; of a JPEG in colour by torchvision's decoder, which takes three quarters of the time."""
    scale, *_ = getattr(image, "decoderconfig", ()) or (1,)  # chosen by `draft`
    if image.format == "JPEG" and image.mode == "RGB" and scale == 1 and (decode := _jpeg_decoder()):
        file = image.fp  # type: ignore[attr-defined]  # not opened again: another file may have its name by now
        file.seek(0)
        with suppress(RuntimeError):  # Pillow says what is damaged, or reads on if LOAD_TRUNCATED_IMAGES is set
            return decode(np.fromfile(file, np.uint8))
    return np.array(image)


@cache
def _jpeg_decoder() -> Callable[[Pixels], Pixels] | None:
    """torchvision's decoder: bytes of a file to `[H, W, 3]`; None without it, or if its pixels are not Pillow's.

    Loading its library takes 4 ms, importing torchvision 2 s.
    """
    package = find_spec("torchvision")
    folders = (package and package.submodule_search_locations) or []
    specs = [PathFinder.find_spec(name, folders) for name in ("image_stable", "image")]  # the latter before 0.29

    def decode(content: Pixels) -> Pixels:
        pixels: Tensor = torch.ops.image.decode_jpeg.default(torch.from_numpy(content), IMAGE_READ_MODE_RGB, False)
        return pixels.permute(1, 2, 0).numpy()

    written = BytesIO()  # builds of libjpeg differ in how they round, and enlarge the colours
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (21, 37, 3), np.uint8)).save(written, "JPEG")
    try:
        torch.ops.load_library(next(spec.origin for spec in specs if spec))
        pixels = decode(np.array(bytearray(written.getvalue())))
    # Without the function, which torchvision 0.29 says will be removed; RuntimeError: it was built without libjpeg.
    except (StopIteration, AttributeError, OSError, RuntimeError):
        return None
    return decode if np.array_equal(pixels, np.array(Image.open(written))) else None


def has_alpha(path: Path) -> bool:
    """Whether an image has transparent pixels, which become white; raises `DataError` if it cannot be read."""
    with open_picture(path) as image:
        scale_transparency(image)
        if image.mode[0] == "I" and "transparency" in image.info:  # Pillow makes these pixels opaque in RGBA
            return bool((np.asarray(image) == image.info["transparency"]).any())
        least, _ = image.convert("RGBA").getchannel("A").getextrema()
        return image.has_transparency_data and least != 255


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels `[C, H, W]` of an image, a copy; uint8 for 8-bit modes."""
    # As torchvision's pil_to_tensor; importing that takes 2 s.
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)


def pixel_range(path: Path) -> tuple[int, float, float] | None:
    """16 or 32 bits (8 of 16 that Pillow keeps), lowest and highest value; None if a file has 8 or is unreadable."""
    with suppress(DataError), open_picture(path) as image:  # reported when it is decoded
        if image.mode[0] in "IF":
            pixels = deep_pixels(image)
            return 32 if is_32_bit(image) else 16, float(pixels.min()), float(pixels.max())
        if ";16" in str(getattr(image, "tile", "")):  # the mode of the file, such as RGB;16B
            return 8, 0, 255
    return None


def is_colour(path: Path, reader: PictureReader) -> bool:
    """Whether an image shows colour; many grey ones are stored with three channels."""
    pixels = np.asarray(replace(reader, size=(64, 64), mode=Mode.rgb, resize=Resize.stretch, draft=True)(path))
    return bool(np.ptp(pixels, axis=2).max() > COLOUR_THRESHOLD)


def find_pictures(names: Sequence[str]) -> list[Path]:
    """The image files that files, folders and glob patterns name, each once, in this order.

    Raises:
        DataError: a folder without images, or a pattern without a match; names it.
    """
    found: list[Path] = []
    left_out: Counter[str] = Counter()
    for name in names:
        matches = [name] if not has_magic(name) or Path(name).exists() else sorted(glob(name, recursive=True))
        if not matches:
            raise DataError(f"{printable(name)}: matches no file")
        for path in map(Path, matches):
            # A file that does not exist is named when it is read.
            inside = list_images(path, left_out) if path.is_dir() else [path]
            if not inside:
                raise DataError(f"{printable(path)}: holds no picture ({', '.join(EXTENSIONS)})")
            found += inside
    log_left_out(left_out)
    return list(dict.fromkeys(found))


def visible_folders(parent: Path, names: Iterable[str]) -> list[str]:
    """Subfolders, sorted, but hidden ones and links to a folder above, which are warned about: it has other classes."""
    visible = sorted(name for name in names if not name.startswith("."))
    upward = [name for name in visible if parent.resolve().is_relative_to(Path(parent, name).resolve())]
    if upward:
        log.warning("%s: links to a parent folder are left out: %s", printable(parent), printable(", ".join(upward)))
    return [name for name in visible if name not in upward]


def list_images(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The pictures in a folder and its subfolders, sorted; counts the other files by their endings in `left_out`.

    Only regular files are pictures; a link to a missing one counts, and is named when it is read. Links to folders are
    followed, each folder once: links that form a loop would never end. Hidden ones are not.
    """
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = visible_folders(Path(parent), folders)
        folders[:] = sorted(name for name in folders if os.path.realpath(os.path.join(parent, name)) not in seen)
        for path in (Path(parent, name) for name in names if not name.startswith(".")):  # as the `._NAME` of macOS
            if not path.name.lower().endswith(EXTENSIONS):
                left_out[path.suffix.lower()] += 1
            elif os.path.isfile(path) or not os.path.exists(path):
                found.append(path)
    return sorted(found)


def log_left_out(left_out: Counter[str]) -> None:
    """Log how many files are no pictures by their names."""
    if left_out:
        counts = ", ".join(f"{count} {printable(ending) or 'without'}" for ending, count in sorted(left_out.items()))
        log.warning("files left out by their endings: %s; pictures end in %s", counts, ", ".join(EXTENSIONS))
