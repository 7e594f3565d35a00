"""The images that a trained model takes: files, PIL images and arrays."""

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitmnist.data.channel_statistics import PLAUSIBLE_CHANNELS
from vitmnist.data.images import ImageReader, Pixels
from vitmnist.errors import DataError, as_data_error

ImageInput = str | PathLike[str] | Image.Image | Pixels | Tensor
"""The path of a file, a PIL image, or an array of one image or several."""


def iterate_images(images: ImageInput | Iterable[ImageInput], channels: int) -> Iterator[Path | Image.Image | Pixels]:
    """Yield single images: paths, PIL images, and arrays uint8 `[H, W, C]`.

    Args:
        channels: the number of channels of the model's images.

    Raises:
        DataError: an input is of another type, or `split_array` refuses it.
    """
    if isinstance(images, str | PathLike):
        yield Path(images)
    elif isinstance(images, Image.Image):
        yield images
    elif isinstance(images, np.ndarray | Tensor):
        yield from split_array(images, channels)
    elif isinstance(images, Iterable) and not isinstance(images, bytes | Mapping):
        for image in images:
            yield from iterate_images(image, channels)
    else:
        name = type(images).__name__
        raise DataError(f"a model takes paths, PIL images, uint8 arrays and lists of these, found {name}")


def split_array(array: Pixels | Tensor, channels: int) -> Iterable[Pixels]:
    """Split an array into images `[H, W, C]`; `TrainedModel.__call__` says which axis is the channels.

    Raises:
        DataError: the array is not uint8, or its axes are ambiguous.
    """
    shape, dtype = tuple(array.shape), str(array.dtype).removeprefix("torch.")
    name = f"{dtype} array {list(shape)}"
    if dtype != "uint8":
        raise DataError(f"{name}: images are bytes 0 to 255; the model normalises them: pass uint8")
    pixels = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    if len(shape) == 2:
        return [pixels[..., None]]
    is_first, is_last = (len(shape) in (3, 4) and shape[axis] in (*PLAUSIBLE_CHANNELS, channels) for axis in (-3, -1))
    is_clear = is_first != is_last
    if len(shape) == 3:
        is_clear = not is_first or (not is_last and shape[0] in (1, channels))
        pixels = pixels[None] if is_first or is_last else pixels[..., None]
    if not is_clear:
        raise DataError(
            f"{name}: its axes are ambiguous; pass uint8 [B, C, H, W] or [B, H, W, C] with C of 1, 3 or 4 channels, "
            "such as array[None] for one image and array[:, None] for grey ones, or PIL images"
        )
    return np.moveaxis(pixels, -3, -1) if is_first else pixels


def convert_image(reader: ImageReader, image: Image.Image | Pixels) -> Pixels:
    """Convert a PIL image, or an array `[H, W, C]`, as the reader converts its file; raises `DataError`."""
    with as_data_error("an image cannot be converted"):
        if not isinstance(image, Image.Image):
            image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        file = getattr(image, "fp", None)
        if file and getattr(image, "tile", None) and image.tell() == 0:
            # Nothing is decoded yet. Decode a JPEG as from its file: at full size, its pixels would differ.
            file.seek(0)
            return reader.decode(np.frombuffer(bytearray(file.read()), np.uint8))
        return reader.convert(image)
