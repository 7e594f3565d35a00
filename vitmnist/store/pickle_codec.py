"""Encodes samples of any structure with pickle, for the memory of this process; `json_codec` is for files."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError, format_error
from vitmnist.store.image_codec import IMAGE_MODES, Buffer, LoadImage, as_uint8_tensor, describe_image


def pickle_sample(sample: object) -> list[Buffer]:
    """Pickle a sample. Returns the pickle, and the bytes of the images, tensors and arrays that it refers to in order.

    Tensors that share a storage still share it and keep their strides, unless they use less than half of it.

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
    return [pickler.head.getvalue(), *pickler.buffers]


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
        return describe_image(obj)

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is torch.UntypedStorage:
            return as_uint8_tensor, (pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(obj).numpy().data),)
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_nested:
            return NotImplemented  # Torch pickles these itself.
        # A small view is pickled without the rest of its storage.
        tensor = obj.clone() if obj.untyped_storage().nbytes() > 2 * obj.nbytes else obj
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _load_tensor, (tensor.untyped_storage(), tensor.dtype, *layout)


class SampleUnpickler(pickle.Unpickler):
    """Unpickles the result of `pickle_sample`; with `as_views`, tensors and arrays are views of `buffers`."""

    def __init__(self, head: memoryview, buffers: Sequence[memoryview], load_image: LoadImage, as_views: bool) -> None:
        self.remaining, self.load_image = iter(buffers), load_image
        super().__init__(io.BytesIO(head), buffers=self.remaining if as_views else map(bytearray, self.remaining))

    def persistent_load(self, pid: Any) -> object:
        return self.load_image(next(self.remaining), **pid)


def _load_tensor(
    storage: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, shape, stride)
