"""Batches of nested dicts, lists and tuples as rows of the tensors that they contain."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.device import backend_of
from vitmnist.store.rows import Rows
from vitmnist.store.tree import Structure, flatten, named_leaves, unflatten


class NoRowsError(DataError):
    """The batch is not a tree of tensors with one row per sample."""


@dataclass(frozen=True)
class BatchRows:
    """The tensors of a batch, their names, such as `batch['image']`, and how they are nested in it."""

    rows: Rows
    names: tuple[str, ...]
    structure: Structure

    @classmethod
    def of(cls, batch: Any, size: int) -> BatchRows:
        """The tensors of a batch of `size` samples.

        Raises:
            NoRowsError: the batch has something other than tensors whose first dimension is that of the samples.
        """
        leaves, structure = flatten(batch)
        if not leaves:
            raise NoRowsError("the batch has no tensor")
        names = tuple(f"batch{path}" for path, _ in named_leaves(batch))
        for name, leaf in zip(names, leaves, strict=True):
            if type(leaf) is not Tensor:  # a subclass would not be delivered as one
                raise NoRowsError(f"{name} is a {type(leaf).__name__}")
            if leaf.layout != torch.strided or leaf.is_nested or leaf.requires_grad:
                raise NoRowsError(f"{name} is sparse, nested or requires a gradient")
            if not leaf.dim() or len(leaf) != size:
                raise NoRowsError(f"{name} has shape {list(leaf.shape)}, which has no row per sample ({size})")
        return cls(Rows(tuple(leaves)), names, structure)

    @property
    def signature(self) -> dict[str, str]:
        """Dtype and shape per sample of each tensor."""
        pairs = zip(self.names, self.rows.tensors, strict=True)
        return {name: f"{tensor.dtype} {list(tensor.shape[1:])}" for name, tensor in pairs}

    @property
    def sample_nbytes(self) -> int:
        """Bytes of a sample."""
        return sum(tensor[0].nbytes for tensor in self.rows.tensors)

    def check_same(self, other: BatchRows) -> None:
        """Raise `NoRowsError` if another batch has another structure, dtype or shape per sample."""
        if other.structure != self.structure:
            raise NoRowsError("the batches differ in their structure")
        for name, signature in self.signature.items():
            if other.signature[name] != signature:
                raise NoRowsError(
                    f"{name} is {other.signature[name]} per sample in one batch, and {signature} in another"
                )

    def gather(self, indices: Sequence[int]) -> Any:
        """The batch of some of the samples; raises `DataError` for an invalid index."""
        try:
            # A third of the time of torch.tensor, for 256 numbers.
            rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
            are_valid = bool(rows.min() >= 0 and rows.max() < len(self.rows))
        except (TypeError, ValueError, OverflowError):
            are_valid = False
        if not are_valid:  # checked on the host, because an index error on a GPU ends the process
            shown = ", ".join(map(str, list(indices)[:3]))
            raise DataError(f"the sampler gives {shown}, …; decoded samples have the indices 0 to {len(self.rows) - 1}")
        backend = backend_of(self.rows.tensors[0].device)
        if backend.is_async:  # out of pageable memory the host would wait for the copy, and for all work before it
            rows = backend.to_device(backend.empty_pinned(rows.shape, rows.dtype).copy_(rows))
        return unflatten(self.rows.gather(rows), self.structure)
