"""Bytes of single values: pictures, tensors, arrays, numbers and text as they are, and of anything else by `pickle`."""

from __future__ import annotations

import io
import pickle
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitmnist.data.difference import stride_order
from vitmnist.errors import DataError, described

TV_TENSORS = ("Image", "Mask", "Video")  # torchvision's tv_tensors that carry nothing besides their values
FORMS = ("int", "float", "bool", "str", "picture", "tensor", "array", "number", *TV_TENSORS, "object")
PICTURE, OBJECT = FORMS.index("picture"), FORMS.index("object")
NUMBERS: dict[type, str] = {int: "<q", float: "<d", bool: "<?7x"}  # how `struct` packs them into 64 bits
NOTHING = torch.empty(0, dtype=torch.uint8)
PLAIN = "pictures, tensors, arrays, numbers and text in dicts, lists and tuples"
FOR_FILE = f"a file keeps only {PLAIN}, of one structure; convert it, or use ram"
MODES = ("1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
"""The modes of PIL images that their bytes describe completely, unlike P, which has a palette."""
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
MAX_KINDS, MAX_DIMS = 32, 5  # a number less than MAX_KINDS is a dtype; above it is the order of dimensions in memory
Buffer = bytes | memoryview
COLUMNS = 5 + MAX_DIMS  # form, mode or dtype, number of bytes, number of dimensions, dimensions, CRC-32 of the bytes


def encode_value(value: Any) -> tuple[list[int], Buffer]:
    """The row of `Samples.shapes` for a value, and its bytes; numbers have none."""
    if type(value) in NUMBERS:
        form = type(value).__name__
        with suppress(struct.error):  # an integer of more than 64 bits
            return [FORMS.index(form), struct.unpack("<q", struct.pack(NUMBERS[type(value)], value))[0]], b""
    if type(value) is str:
        return _with_bytes("str", 0, value.encode(errors="surrogatepass"))
    if isinstance(value, Image.Image) and value.mode in MODES:
        return _with_bytes("picture", MODES.index(value.mode), value.tobytes(), value.height, value.width)
    kind_of_array = _form_of_array(value)
    if kind_of_array and value.ndim <= MAX_DIMS:
        with suppress(TypeError, ValueError, RuntimeError):  # an array of objects, a nested tensor
            is_tensor = isinstance(value, Tensor)
            tensor = value.detach().as_subclass(Tensor).cpu() if is_tensor else torch.tensor(np.array(value))
            kind, order = DTYPES.index(tensor.dtype), []
            if not tensor.is_contiguous():
                order = stride_order(tensor)
                kind += MAX_KINDS * sum(dim * 8**place for place, dim in enumerate(order))
            encoded = (tensor.permute(order) if order else tensor).contiguous().view(-1).view(torch.uint8).numpy().data
            return [FORMS.index(kind_of_array), kind, len(encoded), tensor.dim(), *tensor.shape], encoded
    found = f"a picture of mode {value.mode}" if isinstance(value, Image.Image) else f"a {type(value).__name__}"
    raise DataError(f"a sample has {found}; {FOR_FILE}")


def _form_of_array(value: Any) -> str | None:
    """Which of `FORMS` a tensor, an array or a number of NumPy is; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return "number" if isinstance(value, np.generic) else "array" if type(value) is np.ndarray else None
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.requires_grad:
        return None
    kind = type(value)
    is_image = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in TV_TENSORS
    return "tensor" if kind is Tensor else kind.__name__ if is_image else None


def _with_bytes(form: str, kind: int, content: bytes, *shape: int) -> tuple[list[int], Buffer]:
    return [FORMS.index(form), kind, len(content), len(shape), *shape], content


def decode_value(row: list[int], content: Tensor) -> Any:
    form, kind, shape = FORMS[row[0]], row[1], row[4 : 4 + row[3]]
    if form == "picture":
        return Image.frombytes(MODES[kind], (shape[1], shape[0]), content.numpy().data)
    if form == "str":
        return content.numpy().tobytes().decode(errors="surrogatepass")
    for number, packed in NUMBERS.items():
        if form == number.__name__:
            return struct.unpack(packed, struct.pack("<q", kind))[0]
    order, kind = divmod(kind, MAX_KINDS)
    dims = [order // 8**place % 8 for place in range(len(shape))] if order else list(range(len(shape)))
    stored = content.clone().view(DTYPES[kind]).view([shape[dim] for dim in dims])
    tensor = stored.permute([dims.index(dim) for dim in range(len(shape))]) if order else stored
    if form in ("array", "number"):
        return tensor.numpy()[()] if form == "number" else tensor.numpy()
    if form in TV_TENSORS:
        from torchvision import tv_tensors  # takes 2 s, so it is imported only for such samples

        return getattr(tv_tensors, form)(tensor)
    return tensor


class _Pickler(pickle.Pickler):
    """Pickles tensors, arrays and pictures like `encode_value`: a view of a tensor without the rest of its storage."""

    last: Any = None

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if not isinstance(value, Tensor | np.ndarray | Image.Image):
            return NotImplemented
        attributes = getattr(value, "__dict__", {}) if isinstance(value, Tensor) else {}
        try:
            # A parameter and a tensor that requires a gradient are pickled by torch.
            by_torch = isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad)
            if _form_of_array(value) is None and isinstance(value, Tensor) and not by_torch:
                with torch._C.DisableTorchFunctionSubclass():
                    row, encoded = encode_value(value.detach().as_subclass(Tensor))
                return _restored, (row, pickle.PickleBuffer(encoded), type(value), attributes)
            row, encoded = encode_value(value)
        except (DataError, RuntimeError):  # such as a picture with a palette, or a sparse tensor
            return NotImplemented
        return _restored, (row, pickle.PickleBuffer(encoded))


def _restored(row: list[int], content: Buffer, kind: type[Tensor] | None = None, attributes: Any = None) -> Any:
    value = decode_value(row, torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else NOTHING)
    if kind:
        value = value.as_subclass(kind)
        value.__dict__.update(attributes)
    return value


def pickled(sample: Any) -> Buffer:
    """The bytes of a sample of any kind; raises `DataError` if it cannot be pickled."""
    written = io.BytesIO()
    pickler = _Pickler(written, protocol=5)
    try:
        pickler.dump(sample)
    except Exception as error:  # any method of an object may fail
        name = getattr(pickler.last, "__qualname__", type(pickler.last).__qualname__)
        raise DataError(
            f"a sample has {name}, which cannot be pickled ({described(error)}); define classes and functions at the "
            "top level of a module, and leave open files and locks out of samples"
        ) from error
    return written.getbuffer()
