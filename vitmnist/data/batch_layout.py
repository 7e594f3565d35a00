"""Batches of any structure as rows of two tensors, so that every loader can keep and gather them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from vitmnist.errors import DataError


@dataclass(frozen=True)
class BatchLayout:
    """How a batch of nested dicts, lists and tuples is divided into two tensors, and rebuilt from them.

    The largest tensor is kept as it is. The others are small: a single one is kept too, several are packed into one row
    of bytes per sample.

    Args:
        names: where each tensor is in the batch, such as `['image']`.
        forms: dtype, and shape without the first dimension, of each tensor.
    """

    structure: TreeSpec
    names: tuple[str, ...]
    forms: tuple[tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, batch: Any, size: int) -> BatchLayout:
        """The layout of a batch of `size` samples.

        Raises:
            DataError: the batch has something other than tensors whose first dimension is that of the samples.
        """
        leaves, structure = tree_flatten_with_path(batch)
        for path, leaf in leaves:
            if type(leaf) is not Tensor:  # a subclass would not be delivered as one
                raise DataError(f"batch{keystr(path)} is a {type(leaf).__name__}, and only tensors can be kept")
            if not leaf.dim() or len(leaf) != size:
                raise DataError(
                    f"batch{keystr(path)} has shape {list(leaf.shape)}, which has no row per sample ({size})"
                )
        if not leaves:
            raise DataError("the batch has no tensor")
        names = tuple(keystr(path) for path, _ in leaves)
        return cls(structure, names, tuple((leaf.dtype, leaf.shape[1:]) for _, leaf in leaves))

    def pack(self, batch: Any, size: int) -> tuple[Tensor, Tensor]:
        """The two tensors of a batch of `size` samples.

        Raises:
            DataError: the batch has another layout.
        """
        found = BatchLayout.of(batch, size)
        for name, form, expected in zip(found.names, found.forms, self.forms, strict=False):
            if form != expected:
                (dtype, shape), (first_dtype, first_shape) = form, expected
                raise DataError(
                    f"batch{name} is {dtype} {list(shape)} per sample in one batch, and {first_dtype} "
                    f"{list(first_shape)} in another"
                )
        if found.structure != self.structure:
            raise DataError("the batches differ in their structure")
        leaves = [leaf for _, leaf in tree_flatten_with_path(batch)[0]]
        others = [leaf for place, leaf in enumerate(leaves) if place != self._largest]
        if len(others) != 1:
            rows = [leaf.contiguous().view(size, -1).view(torch.uint8) for leaf in others if leaf.numel()]
            others = [torch.cat([torch.empty(size, 0, dtype=torch.uint8), *rows], dim=1)]
        return leaves[self._largest], others[0]

    def unpack(self, largest: Tensor, others: Tensor) -> Any:
        """The batch of the rows of the two tensors."""
        rest = [form for place, form in enumerate(self.forms) if place != self._largest]
        if len(rest) == 1:
            leaves = [others]
        else:
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in rest]
            leaves = [
                part.clone(memory_format=torch.contiguous_format).view(-1).view(dtype).view(len(largest), *shape)
                for part, (dtype, shape) in zip(others.split(sizes, dim=1), rest, strict=True)
            ]
        leaves.insert(self._largest, largest)
        return tree_unflatten(leaves, self.structure)

    @property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.forms)

    @cached_property
    def _largest(self) -> int:
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in self.forms]
        return sizes.index(max(sizes))


def find_difference(found: Any, expected: Any) -> str | None:
    """Where two batches first differ, in structure, type, dtype, shape or a single bit; None if nowhere."""
    ours, our_structure = tree_flatten_with_path(found)
    theirs, structure = tree_flatten_with_path(expected)
    if our_structure != structure:
        return "the structure"
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        if not (
            _is_same_tensor(one, other) if isinstance(other, Tensor) else type(one) is type(other) and one == other
        ):
            return f"batch{keystr(path)}"
    return None


def _is_same_tensor(one: Any, other: Tensor) -> bool:
    """Bitwise equality, so that a NaN equals itself."""
    if type(one) is not type(other) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.is_contiguous() != other.is_contiguous():  # channels last
        return False
    one, other = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)
