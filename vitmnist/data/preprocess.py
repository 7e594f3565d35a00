"""What happens to a batch on its device before the model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor, nn

from vitmnist.data.augment import Augment, augment_keys
from vitmnist.data.datasets.contract import Split
from vitmnist.data.order import EpochOrder
from vitmnist.errors import DataError


class Preprocess(nn.Module):
    """Normalise uint8 images `[B, C, H, W]` to float32, bit for bit as torchvision's `ToTensor` and `Normalize` do.

    Float images come from a loader that has normalised them itself, and pass. Bytes cross the bus as bytes: a
    quarter of what float32 would be.

    Args:
        split: whose channel statistics are used.
        augment: applied to the normalised images, where keys are given.
    """

    mean: Tensor
    std: Tensor
    white: Tensor
    black: Tensor

    def __init__(self, split: Split, augment: Augment | None = None) -> None:
        super().__init__()
        if augment is not None:
            augment.check(*split.images.shape[-2:])
        self.register_buffer("mean", torch.tensor(split.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(split.std).view(-1, 1, 1))
        # A tensor and not the number 255: CUDA divides by a number by multiplying with its rounded reciprocal.
        self.register_buffer("white", torch.tensor([255.0]))
        self.register_buffer("black", self._normalised(torch.zeros(len(split.mean), 1, 1, dtype=torch.uint8)))
        self.augment = augment

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """float32 `[B, C, H, W]`; the batch itself is never written to.

        Args:
            keys: int64 `[B]`, as `keys` gives them for the batch.

        Raises:
            DataError: images that are neither bytes nor floating point.
        """
        if images.dtype == torch.uint8:
            images = self._normalised(images)
        elif not images.is_floating_point():
            raise DataError(f"images: must be uint8, or floating point and normalised, found {images.dtype}")
        if self.augment is not None and keys is not None:
            images = self.augment(images, keys, self.black)
        return images

    def keys(self, order: EpochOrder, epoch: int, start: int = 0) -> Iterator[Tensor | None]:
        """For each batch of an epoch from `start` on, what its augmentation is drawn from; None where there is none."""
        if self.augment is None:
            return repeat(None)
        return iter(augment_keys(order, epoch, self.mean.device, start).split(order.batch_size))

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().div_(self.white).sub_(self.mean).div_(self.std)
