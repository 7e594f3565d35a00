"""Batches of nested dicts, lists and tuples as the tensors that they contain."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from vitmnist.data.checksums import Checksums
from vitmnist.errors import DataError
from vitmnist.runtime.backend import backend_of


class NoRowsError(DataError):
    """Batches that are no rows of tensors, one for each sample."""


@dataclass(frozen=True)
class BatchTensors:
    """The tensors of a batch by their names, such as `batch['image']`, and how they are nested in it.

    `checksums` has those of each tensor that is in a file.
    """

    tensors: dict[str, Tensor]
    structure: TreeSpec
    checksums: tuple[Checksums, ...] = ()

    @classmethod
    def of(cls, batch: Any, size: int) -> BatchTensors:
        """The tensors of a batch of `size` samples.

        Raises:
            NoRowsError: the batch has something other than tensors whose first dimension is that of the samples.
        """
        leaves, structure = tree_flatten_with_path(batch)
        tensors = {f"batch{keystr(path)}": leaf for path, leaf in leaves}
        if not tensors:
            raise NoRowsError("the batch has no tensor")
        for name, leaf in tensors.items():
            if type(leaf) is not Tensor:  # a subclass would not be delivered as one
                raise NoRowsError(f"{name} is a {type(leaf).__name__}")
            if leaf.layout != torch.strided or leaf.is_nested or leaf.requires_grad:
                raise NoRowsError(f"{name} is sparse, nested or requires a gradient")
            if not leaf.dim() or len(leaf) != size:
                raise NoRowsError(f"{name} has shape {list(leaf.shape)}, which has no row per sample ({size})")
        return cls(tensors, structure)

    @property
    def forms(self) -> dict[str, str]:
        """Dtype and shape per sample of each tensor."""
        return {name: f"{tensor.dtype} {list(tensor.shape[1:])}" for name, tensor in self.tensors.items()}

    @property
    def sample_nbytes(self) -> int:
        """Bytes of a sample."""
        return sum(tensor[0].nbytes for tensor in self.tensors.values())

    def check_same(self, other: BatchTensors) -> None:
        """Raise `NoRowsError` if another batch has another structure, dtype or shape per sample."""
        if other.structure != self.structure:
            raise NoRowsError("the batches differ in their structure")
        for name, form in self.forms.items():
            if other.forms[name] != form:
                raise NoRowsError(f"{name} is {other.forms[name]} per sample in one batch, and {form} in another")

    def gather(self, indices: Sequence[int]) -> Any:
        """The batch of some of the samples; raises `DataError` for an invalid index."""
        tensors = list(self.tensors.values())
        try:
            # A third of the time of torch.tensor, for 256 numbers.
            rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
            are_valid = bool(rows.min() >= 0 and rows.max() < len(tensors[0]))
        except (TypeError, ValueError, OverflowError):
            are_valid = False
        if not are_valid:  # checked on the host, because an index error on a GPU ends the process
            found = ", ".join(map(str, list(indices)[:3]))
            raise DataError(
                f"the sampler gives {found}, …; decoded samples have the indices 0 to {len(tensors[0]) - 1}"
            )
        backend = backend_of(tensors[0].device)
        if backend.is_async:  # out of pageable memory the host would wait for the copy, and for all work before it
            rows = backend.to_device(backend.empty_pinned(rows.shape, rows.dtype).copy_(rows))
        gathered = [tensor.index_select(0, rows) for tensor in tensors]
        for one, of_file in zip(gathered, self.checksums, strict=False):  # there are none in memory
            of_file.checked(one, rows)
        return tree_unflatten(gathered, self.structure)
