"""The whole set is one tensor in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitmnist.data.decoding import load_samples, refuse_random, size_of_samples
from vitmnist.data.loaders.base import LOADERS, Data
from vitmnist.data.loaders.pinned import HostLoader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.memory import Memory, check_fits


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

    def __init__(self, options: RamOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        check_fits("ram", self.needs(options, data, sampler, device), device, others=("cache", "disk"))
        if not isinstance(data, TensorSet) and not options.frozen:
            refuse_random("ram", data, sampler.seed)
        super().__init__(in_memory(data, sampler.seed), sampler, device)

    @classmethod
    def needs(cls, options: RamOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """A set that is in memory already takes no more of it."""
        if isinstance(data, TensorSet):
            return Memory(host=data.nbytes if data.mapped else 0)
        return Memory(host=size_of_samples(data, sampler.seed))


def in_memory(data: Data, seed: int) -> TensorSet:
    """The set as tensors in host memory; random samples as epoch 0 of `seed` has them."""
    if not isinstance(data, TensorSet):
        return load_samples(data, seed)
    return TensorSet(data.images.clone(), data.labels) if data.mapped else data
