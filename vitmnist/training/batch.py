"""A batch: how it is loaded, padded and divided into microbatches.

A rank pads its batch if it has no image in the last batch of an epoch, or if compiled code takes a fixed size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmnist.loaders.base import Loader

PADDING_LABEL = -100
"""The label of padding: the default `ignore_index` of `cross_entropy`. Padding adds to no loss, gradient or metric."""


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's part of a batch, on its device.

    Args:
        images: uint8 or normalised float32 `[B, C, H, W]`.
        labels: int64 `[B]`; padding has the label `PADDING_LABEL`.
        global_size: images in the global batch.
        random_keys: int64 `[B]`, the keys of the augmentation; None without augmentation and after mixing.
        targets: class probabilities of mixed images, float32 `[B, classes]`; None for images that are not mixed.
    """

    images: Tensor
    labels: Tensor
    global_size: int
    random_keys: Tensor | None = None
    targets: Tensor | None = None

    def __len__(self) -> int:
        """The number of images of this rank."""
        return len(self.labels)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by name, except those that are None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def padded(self, length: int) -> Batch:
        """Return the batch, padded to `length` images with images labelled `PADDING_LABEL`."""
        missing = length - len(self)
        if not missing:
            return self
        images = F.pad(self.images, [0, 0, 0, 0, 0, 0, 0, missing])
        labels = F.pad(self.labels, [0, missing], value=PADDING_LABEL)
        random_keys = None if self.random_keys is None else F.pad(self.random_keys, [0, missing])
        return Batch(images, labels, self.global_size, random_keys)

    def microbatches(self, length: int) -> Iterator[Batch]:
        """Yield consecutive microbatches of at most `length` images, as views."""
        for start in range(0, len(self), length):
            rows = slice(start, start + length)
            yield Batch(global_size=self.global_size, **{name: tensor[rows] for name, tensor in self.tensors().items()})


def load_batches(
    loader: Loader, epoch: int, start: int = 0, random_keys: Iterable[Tensor | None] = repeat(None)
) -> Generator[Batch, None, None]:
    """Yield the batches of an epoch from batch `start` on, each with its random keys.

    Raises:
        ValueError: the loader delivers fewer or more batches than the epoch has.
    """
    sampler = loader.sampler
    loaded_batches = zip(range(start, len(loader)), loader.epoch(epoch, start), strict=True)
    for (index, (images, loaded_labels)), keys in zip(loaded_batches, random_keys, strict=False):
        labels = loaded_labels if sampler.num_rank_images(index) else torch.full_like(loaded_labels, PADDING_LABEL)
        yield Batch(images, labels, sampler.num_images(index), keys)
