"""Encodes samples as JSON and the bytes of their arrays, for files: unlike a pickle, reading a file runs no code."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import iTXt
from PIL.TiffImagePlugin import IFDRational
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.store.image_codec import IMAGE_MODES, Buffer, LoadImage, as_uint8_tensor, describe_image
from vitmnist.store.tree import sort_dims_by_stride

TV_TENSORS = ("Image", "Mask", "Video")
"""Torchvision's tv_tensors that have no attributes besides their values."""


def encode_as_json(sample: object) -> list[Buffer]:
    """Encode a sample. Returns its JSON, and the bytes of the images and arrays that it refers to in order.

    Raises:
        DataError: the sample has an object of another type.
    """
    buffers: list[Buffer] = []
    head = json.dumps(_to_json(sample, buffers)).encode()
    return [head, *buffers]


def _to_json(value: Any, buffers: list[Buffer]) -> object:
    """Describe a value as JSON, and append the bytes of its images and arrays to `buffers`."""
    describe, kind = partial(_to_json, buffers=buffers), type(value)
    if value is None or kind in (bool, int, float, str, iTXt):
        return value
    if kind in (list, tuple):
        return {kind.__name__: [*map(describe, value)]}
    if kind in (dict, OrderedDict):
        return {kind.__name__: [(describe(key), describe(item)) for key, item in value.items()]}
    if isinstance(value, IFDRational):
        return {"rational": (value.numerator, value.denominator)}
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": None}
    if isinstance(value, Image.Image) and value.mode in IMAGE_MODES:
        description = describe(describe_image(value))
        buffers.append(value.tobytes())
        return {"image": description}
    type_name, tensor = _to_plain_tensor(value)
    # The order of the dimensions in memory keeps the memory format, such as channels last.
    order = sort_dims_by_stride(tensor)
    stored = tensor.permute(order).contiguous()
    buffers.append(stored.flatten().view(torch.uint8).numpy().data if stored.numel() else b"")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"tensor": {"type_name": type_name, "dtype": dtype, "shape": [*stored.shape], "order": order}}


def decode_json(described: object, buffers: Iterator[memoryview], load_image: LoadImage, as_views: bool) -> Any:
    """Return the value that JSON of `encode_as_json` describes; with `as_views`, arrays are views of `buffers`."""
    if not isinstance(described, dict):
        return described

    def load(part: object) -> Any:
        return decode_json(part, buffers, load_image, as_views)

    ((kind, content),) = described.items()
    if kind == "rational":
        return IFDRational(*content)
    if kind == "bytes":
        return bytes(next(buffers))
    if kind == "image":
        description = load(content)  # Its bytes come before those of the image.
        return load_image(next(buffers), **description)
    if kind == "tensor":
        return _load_array(next(buffers) if as_views else bytearray(next(buffers)), **content)
    if kind in ("dict", "OrderedDict"):
        pairs = [(load(key), load(item)) for key, item in content]
        return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
    items = [*map(load, content)]
    return tuple(items) if kind == "tuple" else items


def _to_plain_tensor(value: object) -> tuple[str, Tensor]:
    """Return the name of the type of an array, and its values as a tensor; raises `DataError` for other objects."""
    with suppress(TypeError, ValueError):  # Torch has no tensors of text, for example.
        if type(value) is np.ndarray or isinstance(value, np.number | np.bool_):
            return "array" if type(value) is np.ndarray else "number", torch.from_numpy(np.array(value))
    if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_nested or value.requires_grad):
        kind = type(value)
        if kind is Tensor or (kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in TV_TENSORS):
            return kind.__name__, value.as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
    name = f"an image of mode {value.mode}" if isinstance(value, Image.Image) else f"a {type(value).__name__}"
    raise DataError(
        f"a sample has {name}; a file stores only images, tensors, arrays, numbers, text and bytes in dicts, lists and "
        "tuples; convert it, or use ram"
    )


def _load_array(content: Buffer, type_name: str, dtype: str, shape: list[int], order: list[int]) -> Any:
    stored = as_uint8_tensor(content).view(getattr(torch, dtype)).view(shape)
    tensor = stored.permute([order.index(dim) for dim in range(len(order))])
    if type_name in ("array", "number"):
        return tensor.numpy()[()] if type_name == "number" else tensor.numpy()
    if type_name in TV_TENSORS:
        from torchvision import tv_tensors  # This import takes 2 s, and only these samples need it.

        return getattr(tv_tensors, type_name)(tensor)
    return tensor
