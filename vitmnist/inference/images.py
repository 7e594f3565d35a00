"""The images that a trained model takes: files, PIL images and arrays."""

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitmnist.data.images import ImageReader, Pixels
from vitmnist.errors import DataError, as_data_error

ImageInput = str | PathLike[str] | Image.Image | Pixels | Tensor
"""The path of a file, a PIL image, or an array of one image or several."""
CHANNELS = (1, 3, 4)
"""The numbers of channels of grey, RGB and RGBA images."""


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
        open_bytes = "; open bytes with PIL.Image.open(io.BytesIO(content))" if isinstance(images, bytes) else ""
        found = type(images).__name__
        raise DataError(f"a model takes paths, PIL images, uint8 arrays and lists of these, found {found}{open_bytes}")


def split_array(array: Pixels | Tensor, channels: int) -> Iterable[Pixels]:
    """Split an array or a tensor into images `[H, W, C]`; `TrainedModel.__call__` describes their shapes.

    Raises:
        DataError: the array is not uint8, or has another shape.
    """
    shape, dtype = list(array.shape), str(array.dtype).removeprefix("torch.")
    if dtype != "uint8":
        raise DataError(f"{dtype} array {shape}: images are bytes 0 to 255; the model normalises them: pass uint8")
    pixels: Pixels = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    if isinstance(array, Tensor) and pixels.ndim > 2:
        pixels = np.moveaxis(pixels, -3, -1)
    if pixels.ndim == 2:
        return [pixels[..., None]]
    if pixels.ndim not in (3, 4) or pixels.shape[-1] not in (*CHANNELS, channels):
        raise DataError(
            f"uint8 array {shape}: pass a NumPy array [H, W], [H, W, C] or [B, H, W, C], or a tensor [H, W], [C, H, W] "
            "or [B, C, H, W], with C of 1, 3 or 4 channels"
        )
    return pixels if pixels.ndim == 4 else [pixels]


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
