"""Samples of any structure and of different sizes, kept as bytes."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vitmnist.data.checksums import Checksums, damage
from vitmnist.errors import DataError, UserError, described
from vitmnist.replacement.encoding import (
    COLUMNS,
    FOR_FILE,
    MODES,
    OBJECT,
    PICTURE,
    PLAIN,
    Buffer,
    decode_value,
    encode_value,
    pickled,
)

BYTES = ("L", "LA", "RGB", "RGBA")
METHODS = ("__call__", "forward")  # of a transform


@dataclass(frozen=True)
class Samples:
    """Samples, pickled or plain: pictures, tensors, arrays, numbers and text in nested dicts, lists and tuples.

    Args:
        content: the bytes of all pictures, tensors, arrays and texts, uint8 `[bytes]`.
        shapes: a description of each value of each sample, int64 `[N, values, COLUMNS]`; it contains the numbers.
        starts: where each sample begins in `content`, int64 `[N]`.
        structure: of a plain sample; a pickled one has a single value.
        as_tensors: return pictures as uint8 tensors `[C, H, W]`.
        checksums: those of `shapes`, if the samples are in a file; their bytes are then compared too.
    """

    content: Tensor
    shapes: Tensor
    starts: Tensor
    structure: TreeSpec | None
    as_tensors: bool = False
    checksums: Checksums | None = None

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        """A copy of the sample."""
        if self.shapes[index, :1, 0].tolist() == [OBJECT]:
            if self.checksums:  # a file could hold any code
                raise damage(self.checksums.entry, index)
            start, nbytes = int(self.starts[index]), int(self.shapes[index, 0, 2])
            return pickle.loads(self.content[start : start + nbytes].numpy().data)
        self.check(index)
        return tree_unflatten(self.values(index), self.structure)  # type: ignore[arg-type]

    def values(self, index: int, *, as_views: bool = False) -> list[Any]:
        """The leaves of a plain sample; those that are pictures as tensors may be views, not to be changed."""
        start, values = int(self.starts[index]), []
        for row in self.shapes[index].tolist():
            content = self.content[start : start + row[2]]
            if self.as_tensors and row[0] == PICTURE:
                # Channels last in memory, for which torch resizes bytes fastest.
                image = content if as_views else content.clone()
                values.append(image.view(*row[4:6], -1).permute(2, 0, 1))
            else:
                values.append(decode_value(row, content))
            start += row[2]
        return values

    def check(self, index: int) -> None:
        """Raise `DamagedCacheError` if a sample is not what was written into its file; takes a second for 2 GB."""
        if not self.checksums:
            return
        start = int(self.starts[index])
        for row in self.shapes[index].tolist():
            if zlib.crc32(self.content[start : start + row[2]].numpy().data) != row[-1]:
                raise damage(self.checksums.entry, index)
            start += row[2]

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


def starts_of(shapes: Tensor) -> Tensor:
    """Where each sample begins in the content, if they follow one another."""
    sizes = shapes[:, :, 2].sum(1)
    return sizes.cumsum(0) - sizes


def encode(sample: Any, structure: TreeSpec | None, *, for_file: bool = False) -> tuple[list[list[int]], list[Buffer]]:
    """The rows of a sample as in `Samples.shapes`, and its bytes; raises `DataError` if it cannot be kept.

    Args:
        structure: of plain samples; others are pickled.
        for_file: with checksums, and without pickled samples.
    """
    try:
        values, found = tree_flatten(sample)
        if found != structure:
            raise DataError(f"the samples differ in their structure; {FOR_FILE}")
        rows, parts = [], []
        for value in values:
            row, encoded = encode_value(value)
            rows.append(_padded(row, zlib.crc32(encoded) if for_file else 0))
            parts.append(encoded)
    except DataError:
        if for_file:
            raise
        content = pickled(sample)
        # In the rows of a plain sample, of which the others stay empty.
        empty = [[0] * COLUMNS] * (structure.num_leaves - 1 if structure else 0)
        return [_padded([OBJECT, 0, len(content)]), *empty], [content]
    return rows, parts


def _padded(row: list[int], checksum: int = 0) -> list[int]:
    return [*row, *[0] * (COLUMNS - 1 - len(row)), checksum]


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
