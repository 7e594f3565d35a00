"""A set of samples as two tensors."""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from vitmnist.errors import DataError


@dataclass(frozen=True)
class Arrays:
    """A set as two tensors, sample by sample along their first dimension.

    Args:
        images: `[N, …]` of any dtype.
        labels: `[N, …]` of any dtype.
        mapped: `images` is a file mapped into memory, whose pages come in as they are read.

    Raises:
        DataError: not tensors, or not as many images as labels.
    """

    images: Tensor
    labels: Tensor
    _: KW_ONLY
    mapped: bool = False

    def __post_init__(self) -> None:
        for name, array in (("images", self.images), ("labels", self.labels)):
            if not isinstance(array, Tensor):
                raise DataError(f"{name}: must be a tensor, found {type(array).__name__}; torch.as_tensor makes one")
            if not array.dim():
                raise DataError(f"{name}: must have a first dimension of samples, found a single value")
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images, but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def check_on_host(self) -> None:
        """Raise `DataError` if the arrays are not in host memory."""
        for array in (self.images, self.labels):
            if array.device.type != "cpu":
                raise DataError(f"the set is on {array.device}, not in host memory; gpu_slice leaves it there")

    @property
    def nbytes(self) -> int:
        """Bytes of images and labels."""
        return self.images.nbytes + self.labels.nbytes


def digest(array: Tensor) -> str:
    """SHA-256 of a CPU tensor's elements."""
    return hashlib.sha256(array.contiguous().view(torch.uint8).numpy().data).hexdigest()
