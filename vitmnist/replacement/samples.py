"""Samples of any structure and of different sizes, kept one after another as bytes."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vitmnist.data.checksums import Checksums, damage
from vitmnist.data.difference import stride_order
from vitmnist.errors import DataError, UserError, described

BYTES = ("L", "LA", "RGB", "RGBA")
TV_TENSORS = ("Image", "Mask", "Video")  # torchvision's tv_tensors that carry nothing besides their values
FORMS = ("int", "float", "bool", "str", "picture", "tensor", "array", "number", *TV_TENSORS, "object")
PICTURE, OBJECT = FORMS.index("picture"), FORMS.index("object")
NUMBERS: dict[type, str] = {int: "<q", float: "<d", bool: "<?7x"}  # how `struct` packs them into 64 bits
METHODS = ("__call__", "forward")  # of a transform
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
COLUMNS = 5 + MAX_DIMS  # form, mode or dtype, number of bytes, number of dimensions, dimensions, CRC-32 of the bytes


@dataclass(frozen=True)
class Samples:
    """Samples, pickled or plain: pictures, tensors, arrays, numbers and text in nested dicts, lists and tuples.

    Args:
        content: the bytes of all pictures, tensors, arrays and texts, uint8 `[bytes]`.
        shapes: a description of each value of each sample, int64 `[N, values, COLUMNS]`; it contains the numbers.
        structure: of a plain sample; a pickled one has a single value.
        as_tensors: return pictures as uint8 tensors `[C, H, W]`.
        checksums: those of `shapes`, if the samples are in a file; their bytes are then compared too.
    """

    content: Tensor
    shapes: Tensor
    structure: TreeSpec | None
    as_tensors: bool = False
    checksums: Checksums | None = None

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        """A copy of the sample."""
        start, values = int(self._starts[index]), []
        rows = self.shapes[index].tolist()
        if rows and rows[0][0] == OBJECT:
            if self.checksums:  # a file could hold any code
                raise damage(self.checksums.entry, index)
            return pickle.loads(self.content[start : start + rows[0][2]].numpy().data)
        for row in rows:
            content = self.content[start : start + row[2]]
            if self.checksums and zlib.crc32(content.numpy().data) != row[-1]:
                raise damage(self.checksums.entry, index)
            values.append(_as_tensor(row, content) if self.as_tensors and row[0] == PICTURE else _decode(row, content))
            start += row[2]
        return tree_unflatten(values, self.structure)  # type: ignore[arg-type]

    def with_tensors(self) -> Samples:
        """The same samples, with pictures as tensors; raises `DataError` if some are not of 8-bit channels."""
        if self._are_pickled:
            raise DataError(f"transforms='tensor': is for samples of {PLAIN}, of one structure")
        if others := self._other_modes():
            raise DataError(f"pictures of mode {', '.join(others)} are no tensors of bytes; convert them to L or RGB")
        return replace(self, as_tensors=True)

    @property
    def are_bytes(self) -> bool:
        """Whether all pictures have 8 bits per channel."""
        return not (self._are_pickled or self._other_modes())

    @property
    def _are_pickled(self) -> bool:
        return bool((self.shapes[:, :1, 0] == OBJECT).any())

    def _other_modes(self) -> list[str]:
        modes = self.shapes[..., 1][self.shapes[..., 0] == PICTURE].unique().tolist()
        return [MODES[mode] for mode in modes if MODES[mode] not in BYTES]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return self.content.nbytes + self.shapes.nbytes

    @cached_property
    def _starts(self) -> Tensor:
        sizes = self.shapes[:, :, 2].sum(1)
        return sizes.cumsum(0) - sizes


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn any error into a `DataError` that says what failed, and the transform or function that raised it."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{what}: {error}") from error
    except Exception as error:  # reading a sample may fail in any way
        frames = [frame for frame, _ in walk_tb(error.__traceback__)][2:]  # without those of this block
        calls = [one.f_locals["self"] for one in frames if one.f_code.co_name in METHODS and "self" in one.f_locals]
        names = [type(one).__name__ for one in calls] or [frame.f_code.co_name for frame in frames]
        raise DataError(f"{what}: {''.join(f'{name} raised ' for name in names[-1:])}{described(error)}") from error


def encode(samples: Sequence[Any], structure: TreeSpec | None, *, for_file: bool = False) -> tuple[Tensor, Tensor]:
    """The content and shapes of some samples, as in `Samples`; raises `DataError` for one that cannot be kept.

    Args:
        structure: of plain samples; others are pickled.
        for_file: with checksums, and without pickled samples.
    """
    content, shapes = [], []
    for sample in samples:
        try:
            rows, parts = _encode_plain(sample, structure, for_file)
        except DataError:
            if for_file:
                raise
            pickled = _pickled(sample)
            # In the rows of a plain sample, of which the others stay empty.
            rows, parts = [_padded([OBJECT, 0, len(pickled)])], [pickled]
            rows += [[0] * COLUMNS] * (structure.num_leaves - 1 if structure else 0)
        shapes.append(rows)
        content += parts
    return torch.cat([NOTHING, *content]), torch.tensor(shapes, dtype=torch.int64)


def _encode_plain(sample: Any, structure: TreeSpec | None, for_file: bool) -> tuple[list[list[int]], list[Tensor]]:
    values, found = tree_flatten(sample)
    if found != structure:
        raise DataError(f"the samples differ in their structure; {FOR_FILE}")
    rows, parts = [], []
    for value in values:
        row, encoded = _encode(value)
        rows.append(_padded(row, zlib.crc32(encoded.numpy().data) if for_file else 0))
        parts.append(encoded)
    return rows, parts


def _padded(row: list[int], checksum: int = 0) -> list[int]:
    return [*row, *[0] * (COLUMNS - 1 - len(row)), checksum]


class _Pickler(pickle.Pickler):
    """Pickles tensors, arrays and pictures like `_encode`: a view of a tensor without the rest of its storage."""

    last: Any = None

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if not isinstance(value, Tensor | np.ndarray | Image.Image):
            return NotImplemented
        attributes = getattr(value, "__dict__", {}) if isinstance(value, Tensor) else {}
        try:
            if _form_of_array(value) is None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                with torch._C.DisableTorchFunctionSubclass():
                    row, encoded = _encode(value.detach().as_subclass(Tensor))
                return _restored, (row, _buffer(encoded), type(value), attributes)
            row, encoded = _encode(value)
        except DataError:  # such as a picture with a palette
            return NotImplemented
        return _restored, (row, _buffer(encoded))


def _buffer(encoded: Tensor) -> pickle.PickleBuffer:
    array: Any = encoded.numpy()
    return pickle.PickleBuffer(array)


def _restored(row: list[int], content: bytearray, kind: type[Tensor] | None = None, attributes: Any = None) -> Any:
    value = _decode(row, torch.frombuffer(content, dtype=torch.uint8) if content else NOTHING)
    if kind:
        value = value.as_subclass(kind)
        value.__dict__.update(attributes)
    return value


def _pickled(sample: Any) -> Tensor:
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
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def load(
    chunks: Iterable[tuple[Tensor, Tensor]], nbytes: int, check_room: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """The content and shapes of all chunks, in memory.

    Args:
        nbytes: expected size of the content.
        check_room: called with the number of further bytes if there is more; raises if they do not fit.
    """
    content, filled, shapes = np.empty(nbytes, np.uint8), 0, []
    for part, rows in chunks:
        if filled + len(part) > len(content):
            check_room(further := max(len(part), len(content) // 8))
            content.resize(len(content) + further, refcheck=False)  # moves pages rather than copying them
        content[filled : filled + len(part)] = part.numpy()
        filled += len(part)
        shapes.append(rows)
    content.resize(filled, refcheck=False)
    return torch.from_numpy(content), torch.cat(shapes)


def _encode(value: Any) -> tuple[list[int], Tensor]:
    """The row of `Samples.shapes` for a value, and its bytes; numbers have none."""
    if type(value) in NUMBERS:
        form = type(value).__name__
        with suppress(struct.error):  # an integer of more than 64 bits
            return [FORMS.index(form), struct.unpack("<q", struct.pack(NUMBERS[type(value)], value))[0]], NOTHING
    if type(value) is str:
        return _with_bytes("str", 0, value.encode(errors="surrogatepass"))
    if isinstance(value, Image.Image) and value.mode in MODES:
        return _with_bytes("picture", MODES.index(value.mode), value.tobytes(), value.height, value.width)
    kind_of_array = _form_of_array(value)
    if kind_of_array and value.ndim <= MAX_DIMS:
        with suppress(TypeError, ValueError):  # such as an array of objects
            is_tensor = isinstance(value, Tensor)
            tensor = value.detach().as_subclass(Tensor).cpu() if is_tensor else torch.tensor(np.array(value))
            kind, order = DTYPES.index(tensor.dtype), []
            if not tensor.is_contiguous():
                order = stride_order(tensor)
                kind += MAX_KINDS * sum(dim * 8**place for place, dim in enumerate(order))
            encoded = (tensor.permute(order) if order else tensor).contiguous().view(-1).view(torch.uint8)
            return [FORMS.index(kind_of_array), kind, len(encoded), tensor.dim(), *tensor.shape], encoded
    found = f"a picture of mode {value.mode}" if isinstance(value, Image.Image) else f"a {type(value).__name__}"
    raise DataError(f"a sample has {found}; {FOR_FILE}")


def _form_of_array(value: Any) -> str | None:
    """Which of `FORMS` a tensor, an array or a number of NumPy is; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return "number" if isinstance(value, np.generic) else "array" if type(value) is np.ndarray else None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    kind = type(value)
    is_image = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in TV_TENSORS
    return "tensor" if kind is Tensor else kind.__name__ if is_image else None


def _with_bytes(form: str, kind: int, content: bytes, *shape: int) -> tuple[list[int], Tensor]:
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else NOTHING
    return [FORMS.index(form), kind, len(encoded), len(shape), *shape], encoded


def _as_tensor(row: list[int], content: Tensor) -> Tensor:
    # Channels last in memory, for which torch resizes bytes fastest.
    return content.clone().view(*row[4:6], -1).permute(2, 0, 1)


def _decode(row: list[int], content: Tensor) -> Any:
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
