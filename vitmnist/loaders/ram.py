"""The whole set is in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

import torch

from vitmnist.data.decoding import iter_pairs, load_chunks, read_pairs, refuse_random
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.loaders.base import LOADERS, Data
from vitmnist.loaders.pinned import HostLoader
from vitmnist.registry import NoOptions
from vitmnist.runtime.memory import Memory, check_fits


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Reads a map-style dataset into memory first, sample by sample.

    Raises:
        ConfigError: its samples are random.
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    def __init__(self, options: NoOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        check_fits("ram", self.needs(options, data, sampler, device), device, others=("cache", "disk"))
        if not isinstance(data, TensorSet):
            refuse_random("ram", data, sampler.seed)
        super().__init__(in_memory(data, sampler.seed), sampler, device)

    @classmethod
    def needs(cls, options: NoOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """The size of the set, unless it is in memory already; estimated from the first sample if it is not decoded."""
        if isinstance(data, TensorSet):
            return Memory(host=data.nbytes if data.mapped else 0)
        first = read_pairs(data, [0], sampler.seed, epoch=0) if sampler.size else ()
        return Memory(host=sampler.size * sum(part.nbytes for part in first))


def in_memory(data: Data, seed: int) -> TensorSet:
    """The set as tensors in host memory; random samples as in epoch 0 of `seed`."""
    if not isinstance(data, TensorSet):
        return TensorSet(*load_chunks(iter_pairs(data, seed), len(data)))  # type: ignore[arg-type]  # torch has no __len__
    return TensorSet(data.mapped.checked(data.images.clone()), data.labels) if data.mapped else data
