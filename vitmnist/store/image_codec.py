"""Turns PIL images into bytes, and the bytes into PIL images or tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError

Buffer = bytes | bytearray | memoryview
LoadImage = Callable[..., Image.Image | Tensor]
"""Creates an image from its bytes and the values of `describe_image`."""
IMAGE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
"""PIL image modes whose bytes, with a palette for P and PA, describe the pixels completely."""


def describe_image(image: Image.Image) -> dict[str, Any]:
    """Return what a transform can read of an image, without its bytes."""
    palette_mode = image.palette.mode if image.palette else "RGB"
    palette = image.getpalette(palette_mode), palette_mode
    return {"mode": image.mode, "size": image.size, "palette": palette, "info": image.info}


def load_image(content: Buffer, mode: str, size: Sequence[int], palette: Any, info: dict[Any, Any]) -> Image.Image:
    """Make a PIL image from its bytes and the values of `describe_image`."""
    image = Image.frombytes(mode, (size[0], size[1]), content)
    if palette[0]:
        image.putpalette(bytes(palette[0]), palette[1])
    image.info = info
    return image


def load_image_tensor(content: Buffer, mode: str, size: Sequence[int], as_view: bool, **other_values: object) -> Tensor:
    """Make a uint8 tensor `[C, H, W]` with its channels last in memory: torch resizes such tensors fastest."""
    if mode not in ("L", "LA", "RGB", "RGBA"):  # The modes with 8 bits per channel
        raise DataError(f"images of mode {mode} are no tensors of bytes; convert them to L or RGB")
    return as_uint8_tensor(content if as_view else bytearray(content)).view(size[1], size[0], -1).permute(2, 0, 1)


def as_uint8_tensor(content: Buffer) -> Tensor:
    """Return the bytes as a uint8 tensor, without a copy. `torch.frombuffer` refuses an empty buffer."""
    return torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
