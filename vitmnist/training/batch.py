"""A batch, its padding and its division into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of padding: the default `ignore_index` of `cross_entropy`. Padding adds neither loss nor gradient."""


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's part of a batch, on its device.

    Args:
        images: uint8 or normalised float32 `[B, C, H, W]`.
        labels: int64 `[B]`; padding has the label `IGNORED`.
        global_size: images in the global batch.
        keys: int64 `[B]`, the random keys of the augmentation; None without augmentation and after mixing.
        targets: class probabilities of mixed images, float32 `[B, classes]`; None for images that are not mixed.
    """

    images: Tensor
    labels: Tensor
    global_size: int
    keys: Tensor | None = None
    targets: Tensor | None = None

    def __len__(self) -> int:
        """The number of images of this rank."""
        return len(self.labels)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by name, except those that are None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def padded(self, length: int) -> Batch:
        """Return the batch, padded to `length` images with images labelled `IGNORED`."""
        missing = length - len(self)
        if not missing:
            return self
        images = F.pad(self.images, [0, 0, 0, 0, 0, 0, 0, missing])
        labels = F.pad(self.labels, [0, missing], value=IGNORED)
        keys = None if self.keys is None else F.pad(self.keys, [0, missing])
        return Batch(images, labels, self.global_size, keys)

    def microbatches(self, length: int) -> Iterator[Batch]:
        """Yield consecutive microbatches of at most `length` images, as views."""
        for start in range(0, len(self), length):
            rows = slice(start, start + length)
            yield Batch(global_size=self.global_size, **{name: tensor[rows] for name, tensor in self.tensors().items()})
