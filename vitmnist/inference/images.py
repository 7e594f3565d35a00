"""The images that a trained model takes: files, PIL images and arrays."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitmnist.data.images import ImageReader, Pixels
from vitmnist.errors import DataError, first_line

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
        raise DataError(
            f"found {type(images).__name__}: a model takes paths, PIL images, uint8 arrays, and lists of these; open "
            "the bytes of a file with PIL.Image.open(io.BytesIO(content))"
        )


def split_array(array: Pixels | Tensor, channels: int) -> Iterable[Pixels]:
    """Split an array into images `[H, W, C]`; `TrainedModel.__call__` says how its axes are told apart.

    Raises:
        DataError: the array is not uint8, or its axes are ambiguous.
    """
    shape = tuple(array.shape)
    name = f"{str(array.dtype).removeprefix('torch.')} array {list(shape)}"
    if not name.startswith("uint8 "):
        raise DataError(f"{name}: images are bytes 0 to 255; the model normalises them: pass uint8")
    pixels = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    if len(shape) == 2:
        return [pixels[..., None]]
    counts = {*CHANNELS, channels}
    if len(shape) not in (3, 4) or (len(shape) == 4 and counts.isdisjoint((shape[-3], shape[-1]))):
        raise DataError(f"{name}: pass [H, W], [H, W, C], [C, H, W] or [B, …] with C of 1, 3 or 4 channels")
    is_first, is_last = shape[-3] in counts, shape[-1] in counts
    if is_first and is_last:
        raise DataError(
            f"{name}: the channels could be first or last; pass PIL.Image.fromarray(image) for each image, with its "
            "channels last"
        )
    if len(shape) == 3 and is_first and shape[0] not in (1, channels):
        raise DataError(
            f"{name}: could be one image of {shape[0]} channels, or {shape[0]} grey images; pass array[None] for one "
            f"image, or array[:, None] for {shape[0]}"
        )
    if len(shape) == 3:
        pixels = pixels[None] if is_first or is_last else pixels[..., None]
    return np.moveaxis(pixels, -3, -1) if is_first else pixels


def convert_image(reader: ImageReader, image: Image.Image | Pixels) -> Pixels:
    """Convert a PIL image, or an array `[H, W, C]`, as the reader converts a file of it; changes no image.

    Raises:
        DataError: the image is damaged, or cannot be converted.
    """
    try:
        if not isinstance(image, Image.Image):
            image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        file = getattr(image, "fp", None)
        if file and getattr(image, "tile", None) and image.tell() == 0:
            # The image is not loaded. Decode its file: a JPEG has other pixels if Pillow decodes it at full size.
            position = file.tell()
            file.seek(0)
            content = np.frombuffer(bytearray(file.read()), np.uint8)
            file.seek(position)
            return reader.decode(content)
        return replace(reader, draft=False).convert(image)  # `draft` would change the size of the caller's image.
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders can raise any exception.
        raise DataError(f"{type(image).__name__}: cannot be read as an image: {first_line(error)}") from error
