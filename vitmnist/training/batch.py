"""A batch as the training step takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of padding, which has neither loss nor gradient: the default `ignore_index` of `cross_entropy`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of this rank, on its device.

    Args:
        images: uint8 or normalised float32 `[B, C, H, W]`.
        labels: int64 `[B]`; padding has the label `IGNORED`.
        keys: int64 `[B]`, the random keys of the augmentation; None without augmentation, and once it is done.
        size: images in the global batch.
        targets: class probabilities of mixed images, float32 `[B, classes]`.
    """

    images: Tensor
    labels: Tensor
    keys: Tensor | None
    size: int
    targets: Tensor | None = None

    def __len__(self) -> int:
        """Images of this rank."""
        return len(self.labels)

    def padded(self, length: int) -> Batch:
        """The batch with images added, whose label is `IGNORED`, up to this length."""
        missing = length - len(self)
        if not missing:
            return self
        images = F.pad(self.images, [0, 0, 0, 0, 0, 0, 0, missing])
        keys = None if self.keys is None else F.pad(self.keys, [0, missing])
        return Batch(images, F.pad(self.labels, [0, missing], value=IGNORED), keys, self.size)

    def microbatches(self, length: int) -> Iterator[Batch]:
        """Parts of at most this length, as views."""
        for start in range(0, len(self), length):
            rows = slice(start, start + length)
            keys, targets = (None if tensor is None else tensor[rows] for tensor in (self.keys, self.targets))
            yield Batch(self.images[rows], self.labels[rows], keys, self.size, targets)
