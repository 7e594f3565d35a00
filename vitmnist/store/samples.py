"""Stores samples of any structure and size as bytes: pickled in memory, as JSON and arrays in a mapped file."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import iTXt
from PIL.TiffImagePlugin import IFDRational
from torch import Tensor

from vitmnist.errors import DataError, format_error
from vitmnist.runtime.memory import check_fits
from vitmnist.store.cache_file import open_or_write_cache

Buffer = bytes | bytearray | memoryview
LoadImage = Callable[..., Image.Image | Tensor]
"""Creates an image from its bytes and the values of `_describe_image`."""
IMAGE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
"""PIL image modes whose bytes, with a palette for P and PA, describe the pixels completely."""
BYTE_MODES = ("L", "LA", "RGB", "RGBA")
"""PIL image modes with 8 bits per channel."""
TV_TENSORS = ("Image", "Mask", "Video")
"""Torchvision's tv_tensors that have no attributes besides their values."""
FILE_ADVICE = (
    "a file keeps only images, tensors, arrays, numbers, text and bytes in dicts, lists and tuples; convert it, or "
    "use ram"
)
"""This text ends the message about a sample that cannot be stored in a file."""
MAX_STORAGE_RATIO = 2
"""A tensor is copied out of a storage that is more than this many times larger than the tensor."""


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as bytes: pickled, or without pickle if they are in a file, which anyone can have written.

    Args:
        blocks: the bytes of the samples, as one or more uint8 tensors.
        spans: int64 `[N, 3]`: for each sample the index of its block, and its start and stop there.
        named_tuples: for samples in a file, their classes of named tuples by name; None: the samples are pickled.
        as_tensors: load images as uint8 tensors `[C, H, W]`; an image of another depth then raises `DataError`.
    """

    blocks: Sequence[Tensor]
    spans: Tensor
    named_tuples: dict[str, type] | None
    as_tensors: bool = False

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Any:
        return self.load(index)

    def load(self, index: int, as_views: bool = False) -> Any:
        """Load a sample; with `as_views`, its tensors, arrays and images can be views: do not modify them."""
        if index < 0:  # The original might not count from the end.
            raise DataError(f"the sampler gives {index}; decoded samples have the indices 0 to {len(self) - 1}")
        block, start, stop = self.spans[index].tolist()
        content = self.blocks[block][start:stop].numpy().data
        load_image = partial(_load_image_tensor, as_view=as_views) if self.as_tensors else _load_image
        head, *buffers = _unpack(content)
        if self.named_tuples is not None:
            return _FileDecoder(iter(buffers), self.named_tuples, load_image, as_views).load(json.loads(bytes(head)))
        return _SampleUnpickler(head, buffers, load_image, as_views).load()

    @property
    def nbytes(self) -> int:
        return int((self.spans[:, 2] - self.spans[:, 1]).sum()) + self.spans.nbytes


def encode_samples(samples: Iterable[object], named_tuples: dict[str, type] | None = None) -> EncodedSamples:
    """Encode samples as one block of bytes; raises `DataError` if a sample cannot be encoded.

    Args:
        named_tuples: for a file, receives the classes of named tuples; None: pickle the samples.
    """
    content, spans = bytearray(), []
    for sample in samples:
        start = len(content)
        for part in _pickle(sample) if named_tuples is None else _encode_for_file(sample, named_tuples):
            content += part
        spans.append((0, start, len(content)))
    return EncodedSamples([torch.frombuffer(content, dtype=torch.uint8)], torch.tensor(spans), named_tuples)


def keep_samples_in_memory(chunks: Iterable[EncodedSamples], expected_nbytes: int) -> EncodedSamples:
    """Collect the samples of chunks of one block each; raises `OutOfSpaceError` if there is too little memory."""
    blocks: list[Tensor] = []
    spans: list[Tensor] = []
    needed = expected_nbytes
    for chunk in chunks:
        check_fits("ram", needed, torch.device("cpu"))
        spans.append(chunk.spans + torch.tensor([len(blocks), 0, 0]))
        # Copy it: a block from a worker holds a file descriptor and scarce shared memory.
        blocks.append(chunk.blocks[0].clone())
        needed = max(needed - blocks[-1].nbytes, blocks[-1].nbytes)
    return EncodedSamples(blocks, torch.cat(spans), named_tuples=None)


def keep_samples_in_file(
    chunks: Callable[[], Iterable[EncodedSamples]],
    size: int,
    folder: Path,
    fingerprint: str | None,
    named_tuples: dict[str, type],
) -> EncodedSamples:
    """Write chunks of samples from `encode_samples` into a cache; see `open_or_write_cache`."""

    def chunks_of_tensors() -> Iterator[tuple[Tensor, Tensor]]:
        filled = 0
        for chunk in chunks():
            yield chunk.blocks[0], chunk.spans + torch.tensor([0, filled, filled])
            filled += len(chunk.blocks[0])

    (content, spans), _ = open_or_write_cache(folder, fingerprint, size, chunks_of_tensors, names=("samples", "spans"))
    return EncodedSamples([content], spans, named_tuples)


def _pickle(sample: object) -> list[Buffer]:
    """Pickle a sample into consecutive parts of its bytes.

    Tensors keep their strides. Tensors that share a storage still share it, unless they use less than half of it.

    Raises:
        DataError: the sample cannot be pickled.
    """
    pickler = _SamplePickler()
    try:
        pickler.dump(sample)
    except Exception as error:  # Any method of an object can fail.
        raise DataError(
            f"a sample cannot be pickled ({format_error(error)}); define classes and functions at the top level of a "
            "module, and leave open files and locks out of samples"
        ) from error
    return _pack(pickler.head.getvalue(), pickler.buffers)


class _SamplePickler(pickle.Pickler):
    """Pickles tensors, arrays and images out of band, and only the part of a large storage that a tensor uses."""

    def __init__(self) -> None:
        self.head = io.BytesIO()
        self.buffers: list[Buffer] = []
        # The callback must not refer to `self`: the garbage collector raises an error for a cycle through a pickler.
        buffers = self.buffers
        super().__init__(self.head, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))

    def persistent_id(self, obj: object) -> dict[str, Any] | None:
        if not isinstance(obj, Image.Image) or obj.mode not in IMAGE_MODES:
            return None
        self.buffers.append(obj.tobytes())
        return _describe_image(obj)

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is torch.UntypedStorage:
            return _from_buffer, (pickle.PickleBuffer(_bytes_of(obj, 0, obj.nbytes())),)
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_nested:
            return NotImplemented  # Torch pickles these itself.
        tensor = _compact(obj)
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _load_tensor, (tensor.untyped_storage(), tensor.dtype, *layout)


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it uses less than half of its storage or of the span of its elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((int(size) - 1) * stride for size, stride in steps) if tensor.numel() else 0
    if span > MAX_STORAGE_RATIO * tensor.numel():
        return tensor.clone()
    if tensor.untyped_storage().nbytes() > MAX_STORAGE_RATIO * span * tensor.itemsize:
        return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
    return tensor


class _SampleUnpickler(pickle.Unpickler):
    """Unpickles a sample from `head`, where its images and other buffers are referred to in order."""

    def __init__(self, head: memoryview, buffers: Sequence[memoryview], load_image: LoadImage, as_views: bool) -> None:
        self.remaining, self.load_image = iter(buffers), load_image
        super().__init__(io.BytesIO(head), buffers=self.remaining if as_views else map(bytearray, self.remaining))

    def persistent_load(self, pid: Any) -> object:
        return self.load_image(next(self.remaining), **pid)


def _load_tensor(
    storage: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, shape, stride)


def _encode_for_file(sample: object, named_tuples: dict[str, type]) -> list[Buffer]:
    """Encode a sample as JSON and the bytes of its images and arrays; raises `DataError` for other objects."""
    buffers: list[Buffer] = []
    head = json.dumps(_to_json(sample, buffers, named_tuples)).encode()
    return _pack(head, buffers)


def _to_json(value: Any, buffers: list[Buffer], named_tuples: dict[str, type]) -> object:
    """Describe a value as JSON, and append the bytes of its images and arrays to `buffers`."""
    describe, kind = partial(_to_json, buffers=buffers, named_tuples=named_tuples), type(value)
    if value is None or kind in (bool, int, float, str, iTXt):
        return value
    if kind in (list, tuple):
        return {kind.__name__: [*map(describe, value)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        name = f"{kind.__module__}.{kind.__qualname__}"
        named_tuples[name] = kind
        return {"named tuple": [name, *map(describe, value)]}
    if kind in (dict, OrderedDict):
        return {kind.__name__: [(describe(key), describe(item)) for key, item in value.items()]}
    if isinstance(value, IFDRational):
        return {"rational": (value.numerator, value.denominator)}
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": None}
    if isinstance(value, Image.Image) and value.mode in IMAGE_MODES:
        description = describe(_describe_image(value))
        buffers.append(value.tobytes())
        return {"image": description}
    type_name, tensor = _to_plain_tensor(value)
    # The order of the dimensions in memory keeps the memory format, such as channels last.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    stored = tensor.permute(order).contiguous()
    buffers.append(stored.flatten().view(torch.uint8).numpy().data if stored.numel() else b"")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"tensor": {"type_name": type_name, "dtype": dtype, "shape": [*stored.shape], "order": order}}


@dataclass
class _FileDecoder:
    """Makes the values that `_to_json` described from the bytes of their images and arrays, in order."""

    buffers: Iterator[memoryview]
    named_tuples: dict[str, type]
    load_image: LoadImage
    as_views: bool

    def load(self, described: object) -> Any:
        """Return the value of a description; raises `DataError` for a class of named tuples that is not known."""
        if not isinstance(described, dict):
            return described
        ((kind, content),) = described.items()
        if kind == "rational":
            return IFDRational(*content)
        if kind == "bytes":
            return bytes(next(self.buffers))
        if kind == "image":
            description = self.load(content)
            return self.load_image(next(self.buffers), **description)
        if kind == "tensor":
            return _load_array(next(self.buffers) if self.as_views else bytearray(next(self.buffers)), **content)
        if kind in ("dict", "OrderedDict"):
            pairs = [(self.load(key), self.load(item)) for key, item in content]
            return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
        items = [*map(self.load, content)]
        if kind == "named tuple":
            name, *values = items
            if name not in self.named_tuples:
                raise DataError(f"a sample has a {name}, and the first samples have none; use ram")
            return self.named_tuples[name](*values)
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
    raise DataError(f"a sample has {name}; {FILE_ADVICE}")


def _load_array(content: Buffer, type_name: str, dtype: str, shape: list[int], order: list[int]) -> Any:
    stored = _from_buffer(content).view(getattr(torch, dtype)).view(shape)
    tensor = stored.permute([order.index(dim) for dim in range(len(order))])
    if type_name in ("array", "number"):
        return tensor.numpy()[()] if type_name == "number" else tensor.numpy()
    if type_name in TV_TENSORS:
        from torchvision import tv_tensors  # This import takes 2 s, and only these samples need it.

        return getattr(tv_tensors, type_name)(tensor)
    return tensor


def _describe_image(image: Image.Image) -> dict[str, Any]:
    """Return what a transform can read of an image, without its bytes."""
    palette_mode = image.palette.mode if image.palette else "RGB"
    palette = image.getpalette(palette_mode), palette_mode
    return {"mode": image.mode, "size": image.size, "palette": palette, "info": image.info}


def _load_image(content: Buffer, mode: str, size: Sequence[int], palette: Any, info: dict[Any, Any]) -> Image.Image:
    image = Image.frombytes(mode, (size[0], size[1]), content)
    if palette[0]:
        image.putpalette(bytes(palette[0]), palette[1])
    image.info = info
    return image


def _load_image_tensor(content: Buffer, mode: str, size: Sequence[int], as_view: bool, **others: object) -> Tensor:
    """Make a uint8 tensor `[C, H, W]` with its channels last in memory: torch resizes such tensors fastest."""
    if mode not in BYTE_MODES:
        raise DataError(f"images of mode {mode} are no tensors of bytes; convert them to L or RGB")
    return _from_buffer(content if as_view else bytearray(content)).view(size[1], size[0], -1).permute(2, 0, 1)


def _bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(storage)[start:stop].numpy().data


def _from_buffer(content: Buffer) -> Tensor:
    """Return the bytes as a uint8 tensor, without a copy. `torch.frombuffer` refuses an empty buffer."""
    return torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)


def _pack(head: bytes, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Prefix the parts of a sample with their count and sizes."""
    sizes = [len(head), *(memoryview(buffer).nbytes for buffer in buffers)]
    return [struct.pack(f"<{len(sizes) + 1}q", len(sizes), *sizes), head, *buffers]


def _unpack(content: memoryview) -> list[memoryview]:
    """Return views of the parts of a sample that `_pack` joined."""
    (count,) = struct.unpack_from("<q", content)
    start, parts = 8 * (1 + count), []
    for size in struct.unpack_from(f"<{count}q", content, 8):
        parts.append(content[start : start + size])
        start += size
    return parts
