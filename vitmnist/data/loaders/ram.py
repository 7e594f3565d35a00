"""The whole set is one tensor in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

import torch
from torch import Tensor

from vitmnist.config import Shuffle
from vitmnist.data.dataset import Split
from vitmnist.data.loaders.contract import LOADERS, Batches, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.registry import NoOptions


@LOADERS.register("ram")
class RamLoader(Loader):
    """With a GPU, batches are gathered into pinned memory, so that the copy runs beside the computation.

    torch's pinned allocator hands a buffer out again only once the copy from it is over. On the CPU contiguous
    batches are views of the set.
    """

    def __init__(self, options: NoOptions, split: Split, order: EpochOrder, device: torch.device) -> None:
        super().__init__(order)
        self.device = device
        self.pinned = device.type == "cuda"
        # Only contiguous batches are copied to the device straight from the set.
        straight = self.pinned and order.shuffle != Shuffle.sample
        self.images = split.images.pin_memory() if straight else split.images
        self.labels = split.labels.pin_memory() if straight else split.labels

    def batches(self, number: int, start: int) -> Batches:
        rows = self.images.flatten(1)
        for indices in self.order.batches(number, start):
            if isinstance(indices, slice):
                images, labels = self.images[indices], self.labels[indices]
            else:
                images = self._gather(rows, indices).view(-1, *self.images.shape[1:])
                labels = self._gather(self.labels, indices)
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _gather(self, rows: Tensor, indices: Tensor) -> Tensor:
        gathered = torch.empty((len(indices), *rows.shape[1:]), dtype=rows.dtype, pin_memory=self.pinned)
        return torch.index_select(rows, 0, indices, out=gathered)
