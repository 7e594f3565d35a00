"""A sample of any structure as bytes: pickled in memory, and without pickle in a file."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError, described
from vitmnist.store.tree import Structure, flatten, stride_order, unflatten

Buffer = bytes | bytearray | memoryview
LoadImage = Callable[[str, tuple[int, int], Buffer], Any]
"""Makes an image of its mode, its size (width, height) and its bytes."""
IMAGE_MODES = ("1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
"""The modes of PIL images that their bytes describe completely, unlike P, which has a palette."""
TV_TENSORS = ("Image", "Mask", "Video")  # torchvision's tv_tensors that carry nothing besides their values
PLAIN = "pictures, tensors, arrays, numbers and text in dicts, lists and tuples"
FOR_FILE = f"a file keeps only {PLAIN}, of one structure; convert it, or use ram"
ALIGNMENT = 16  # bytes; the largest element of a tensor, complex128
MAX_GAPS = 2  # a tensor whose elements are further apart in memory, on average, is kept without the gaps


def pickle_sample(sample: Any) -> tuple[list[Buffer], set[str]]:
    """The bytes of a sample, as consecutive parts, and the modes of its PIL images.

    Tensors keep their strides, and those that share a storage still share it.

    Raises:
        DataError: it cannot be pickled.
    """
    pickler = _SamplePickler({})
    try:
        pickler.dump(sample)
        if pickler.extents_grew:  # tensors that share a storage use more of it than was known
            pickler = _SamplePickler(pickler.extents)
            pickler.dump(sample)
    except Exception as error:  # any method of an object may fail
        name = getattr(pickler.last, "__qualname__", type(pickler.last).__qualname__)
        raise DataError(
            f"a sample has {name}, which cannot be pickled ({described(error)}); define classes and functions at the "
            "top level of a module, and leave open files and locks out of samples"
        ) from error
    return _pack(pickler.head.getvalue(), pickler.images, pickler.buffers), pickler.image_modes


def unpickle_sample(content: memoryview, load_image: LoadImage, *, as_views: bool = False) -> Any:
    """The sample, a copy; with `as_views` its tensors and arrays may be views of `content`.

    Args:
        load_image: makes the images of the sample, from views of `content`.
    """
    head, images, buffers = _unpack(content)
    remaining = iter(images)
    unpickler = _SampleUnpickler(io.BytesIO(head), buffers=buffers if as_views else map(bytearray, buffers))
    unpickler.load_image = lambda image: load_image(*image, next(remaining))
    return unpickler.load()


def encode_plain(sample: Any, structure: Structure) -> tuple[list[Buffer], set[str]]:
    """As `pickle_sample`, without pickle: a JSON text describes the leaves of a sample, before images and arrays.

    Raises:
        DataError: it has another structure, or something else in it.
    """
    leaves, its_structure = flatten(sample)
    if its_structure != structure:
        raise DataError(f"the samples differ in their structure; {FOR_FILE}")
    descriptions: list[Any] = []
    images: list[Buffer] = []
    arrays: list[Buffer] = []
    modes = set[str]()
    for leaf in leaves:
        if type(leaf) in (int, float, bool, str):
            descriptions.append(leaf)
            continue
        kind, tensor = _plain_kind(leaf)
        if tensor is None:
            modes.add(kind)
            images.append(leaf.tobytes())
            descriptions.append({"mode": kind, "size": leaf.size})
            continue
        order = stride_order(tensor)  # keeps the memory format, such as channels last
        stored = tensor.permute(order).contiguous()
        first = int(stored.storage_offset()) * stored.itemsize
        arrays.append(_bytes_of(stored.untyped_storage(), first, first + stored.nbytes).data)
        descriptions.append({"kind": kind, "dtype": str(tensor.dtype), "shape": [*stored.shape], "order": order})
    return _pack(json.dumps(descriptions).encode(), images, arrays), modes


def decode_plain(content: memoryview, structure: Structure, load_image: LoadImage, *, as_views: bool = False) -> Any:
    """The sample, a copy as by `unpickle_sample`; raises `ValueError` if the bytes are no such sample."""
    head, *parts = _unpack(content)
    images, arrays = map(iter, parts)
    leaves = []
    for description in json.loads(bytes(head)):
        if not isinstance(description, dict):
            leaves.append(description)
        elif "mode" in description:
            leaves.append(load_image(description["mode"], tuple(description["size"]), next(images)))
        else:
            array = next(arrays)
            leaves.append(_load_array(array if as_views else bytearray(array), **description))
    return unflatten(leaves, structure)


def _plain_kind(leaf: Any) -> tuple[str, Tensor | None]:
    """What a leaf is in a file, and its values; None for a PIL image."""
    if isinstance(leaf, Image.Image) and leaf.mode in IMAGE_MODES:
        return leaf.mode, None
    with suppress(TypeError, ValueError):  # an array that torch cannot hold, such as one of text
        if type(leaf) is np.ndarray or isinstance(leaf, np.number | np.bool_):
            return "array" if type(leaf) is np.ndarray else "number", torch.from_numpy(np.array(leaf))
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not (leaf.is_nested or leaf.requires_grad):
        kind = type(leaf)
        if kind is Tensor or (kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in TV_TENSORS):
            return kind.__name__, leaf.as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
    name = f"a picture of mode {leaf.mode}" if isinstance(leaf, Image.Image) else f"a {type(leaf).__name__}"
    raise DataError(f"a sample has {name}; {FOR_FILE}")


def _load_array(content: Any, kind: str, dtype: str, shape: list[int], order: list[int]) -> Any:
    values = torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
    stored = values.view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
    tensor = stored.permute([order.index(dim) for dim in range(len(order))])
    if kind in ("array", "number"):
        return tensor.numpy()[()] if kind == "number" else tensor.numpy()
    if kind in TV_TENSORS:
        from torchvision import tv_tensors  # takes 2 s, so it is imported only for such samples

        return getattr(tv_tensors, kind)(tensor)
    return tensor


def _pack(head: bytes, images: Sequence[Buffer], buffers: Sequence[Buffer]) -> list[Buffer]:
    """The parts of a sample after their sizes: how many images, how many buffers, the bytes of each part."""
    sizes = [len(head), *(memoryview(part).nbytes for part in (*images, *buffers))]
    return [struct.pack(f"<{len(sizes) + 2}q", len(images), len(buffers), *sizes), head, *images, *buffers]


def _unpack(content: memoryview) -> tuple[memoryview, list[memoryview], list[memoryview]]:
    """The head, the images and the buffers of a sample, as views."""
    images, buffers = struct.unpack_from("<2q", content)
    count = 1 + images + buffers
    start, parts = 8 * (2 + count), []
    for size in struct.unpack_from(f"<{count}q", content, 16):
        parts.append(content[start : start + size])
        start += size
    return parts[0], parts[1 : 1 + images], parts[1 + images :]


class _SamplePickler(pickle.Pickler):
    """Pickles tensors, arrays and images out of band: without the parts of a storage that the sample does not use.

    Args:
        extents: the first byte that the tensors of the sample use of each storage, by its address, and the last plus 1.

    Attributes:
        extents_grew: `extents` were too small for a tensor, so this pickle cannot be used.
        images: the bytes of the PIL images in the sample.
        last: the object that was pickled last, to name it if it cannot be.
        image_modes: of these images.
    """

    def __init__(self, extents: dict[int, tuple[int, int]]) -> None:
        self.head = io.BytesIO()
        self.buffers: list[Buffer] = []
        super().__init__(self.head, protocol=5, buffer_callback=lambda buffer: self.buffers.append(buffer.raw()))
        self.extents, self.extents_grew = extents, False
        self.last: Any = None
        self.images: list[Buffer] = []
        self.image_modes: set[str] = set()
        self._storages: dict[int, _Storage] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Image.Image) or value.mode not in IMAGE_MODES:
            return None
        self.image_modes.add(value.mode)
        self.images.append(value.tobytes())
        return value.mode, value.size

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if type(value) is _Storage:
            return _load_storage, (pickle.PickleBuffer(value.content),)
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_nested:
            return NotImplemented  # torch pickles these itself
        return self._reduce_tensor(value) if value.numel() else (_load_empty, (tuple(value.shape), value.dtype))

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        span = 1 + sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span > MAX_GAPS * tensor.numel():
            tensor, span = tensor.clone(), tensor.numel()
        itemsize, address = tensor.itemsize, tensor.untyped_storage().data_ptr()
        first = int(tensor.storage_offset()) * itemsize
        start, stop = first - first % ALIGNMENT, first + span * itemsize
        known_start, known_stop = self.extents.setdefault(address, (start, stop))
        if start < known_start or stop > known_stop:
            self.extents[address] = min(start, known_start), max(stop, known_stop)
            self.extents_grew = True
        if address not in self._storages:
            self._storages[address] = _Storage(tensor, *self.extents[address])
        storage = self._storages[address]
        offset = (first - storage.start) // itemsize
        return _load_tensor, (storage, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())


class _SampleUnpickler(pickle.Unpickler):
    load_image: Callable[[tuple[str, tuple[int, int]]], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.load_image(pid)


class _Storage:
    """Some bytes of the storage of a tensor; refers to it, so that no other storage gets its address."""

    def __init__(self, tensor: Tensor, start: int, stop: int) -> None:
        self.start, self.storage = start, tensor.untyped_storage()
        self.content = _bytes_of(self.storage, start, stop)


def _bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> Any:
    """A view of a storage, as a NumPy array uint8 `[stop - start]`."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)[start:stop].numpy()


def _load_storage(content: Buffer) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)


def _load_tensor(
    storage: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, shape, stride)


def _load_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
