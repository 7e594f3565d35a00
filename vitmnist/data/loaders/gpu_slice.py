"""The whole set lives on the run's device; a batch is one gather there, or a slice."""

from __future__ import annotations

import torch

from vitmnist.data.dataset import Split
from vitmnist.data.loaders.contract import LOADERS, Batches, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.registry import NoOptions


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """No batch ever crosses the bus: the set does once, as bytes, and each epoch's permutation does.

    On the CPU the set stays where it is. Contiguous batches are views of it.
    """

    def __init__(self, options: NoOptions, split: Split, order: EpochOrder, device: torch.device) -> None:
        super().__init__(order)
        self.device = device
        self.images = split.images.to(device)
        self.labels = split.labels.to(device)

    def batches(self, number: int, start: int) -> Batches:
        # index_select on rows is several times faster than images[indices], which computes an address per pixel.
        rows = self.images.flatten(1)
        for indices in self.order.batches(number, start, self.device):
            if isinstance(indices, slice):
                yield self.images[indices], self.labels[indices]
            else:
                images = rows.index_select(0, indices).view(-1, *self.images.shape[1:])
                yield images, self.labels.index_select(0, indices)
