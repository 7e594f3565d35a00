"""The whole set is one tensor in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

import torch

from vitmnist.data.arrays import Arrays
from vitmnist.data.loaders.contract import LOADERS, Data
from vitmnist.data.loaders.host import HostLoader
from vitmnist.data.order import EpochOrder
from vitmnist.data.samples import load_samples, size_of_samples
from vitmnist.memory import Memory, check_fits
from vitmnist.registry import NoOptions


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """A map-style data set is read into memory first, sample by sample.

    Raises:
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    def __init__(self, options: NoOptions, data: Data, order: EpochOrder, device: torch.device) -> None:
        check_fits("ram", self.needs(options, data, order, device), device, others=("cache", "disk"))
        super().__init__(in_memory(data), order, device)

    @classmethod
    def needs(cls, options: NoOptions, data: Data, order: EpochOrder, device: torch.device) -> Memory:
        """A set that is in memory already takes no more of it."""
        if isinstance(data, Arrays):
            return Memory(host=data.nbytes if data.mapped else 0)
        return Memory(host=size_of_samples(data))


def in_memory(data: Data) -> Arrays:
    """The set as tensors in host memory."""
    if not isinstance(data, Arrays):
        return load_samples(data)
    return Arrays(data.images.clone(), data.labels) if data.mapped else data
