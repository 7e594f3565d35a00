"""The whole set is one tensor in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitmnist.data.arrays import Arrays
from vitmnist.data.decoding import load_samples, refuse_random, size_of_samples
from vitmnist.data.loaders.contract import LOADERS, Data
from vitmnist.data.loaders.host import HostLoader
from vitmnist.data.order import EpochOrder
from vitmnist.memory import Memory, check_fits


@dataclass
class RamOptions:
    """See `conf/data/loader/ram.yaml`."""

    frozen: bool = False


@LOADERS.register("ram", RamOptions)
class RamLoader(HostLoader):
    """A map-style data set is read into memory first, sample by sample.

    Raises:
        ConfigError: its samples are random, and the options do not say `frozen`.
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    def __init__(self, options: RamOptions, data: Data, order: EpochOrder, device: torch.device) -> None:
        check_fits("ram", self.needs(options, data, order, device), device, others=("cache", "disk"))
        if not isinstance(data, Arrays) and not options.frozen:
            refuse_random("ram", data, order.seed)
        super().__init__(in_memory(data, order.seed), order, device)

    @classmethod
    def needs(cls, options: RamOptions, data: Data, order: EpochOrder, device: torch.device) -> Memory:
        """A set that is in memory already takes no more of it."""
        if isinstance(data, Arrays):
            return Memory(host=data.nbytes if data.mapped else 0)
        return Memory(host=size_of_samples(data, order.seed))


def in_memory(data: Data, seed: int) -> Arrays:
    """The set as tensors in host memory; random samples as epoch 0 of `seed` has them."""
    if not isinstance(data, Arrays):
        return load_samples(data, seed)
    return Arrays(data.images.clone(), data.labels) if data.mapped else data
