"""The whole set is on the run's device; a batch is one gather there, or a slice."""

from __future__ import annotations

import torch

from vitmnist.data.loaders.base import LOADERS, Batches, Data, Loader
from vitmnist.data.loaders.pinned import gather
from vitmnist.data.loaders.ram import in_memory
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.registry import NoOptions
from vitmnist.runtime.memory import Memory, check_fits


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """Copies the set to the device once, and each epoch's permutation; no batch crosses the bus.

    On the CPU the set is not copied. Contiguous batches are views. Each of several ranks keeps the whole set.

    Raises:
        ConfigError: a data set that is read sample by sample.
        DoesNotFitError: the device's memory is too small for the set.
    """

    def __init__(self, options: NoOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        if not isinstance(data, TensorSet):
            raise ConfigError(
                "gpu_slice: keeps a set of tensors on the device, and this one is read sample by sample; "
                "give it as (images, labels), or choose ram, cache, disk or prefetch"
            )
        super().__init__(sampler)
        check_fits("gpu_slice", self.needs(options, data, sampler, device), device, others=("ram", "cache", "disk"))
        tensors = in_memory(data, sampler.seed) if device.type == "cpu" else data
        self.resident = TensorSet(tensors.images.detach().to(device), tensors.labels.detach().to(device))

    @classmethod
    def needs(cls, options: NoOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """The set and the permutation of an epoch; only the permutation if the set is already on the device."""
        if not isinstance(data, TensorSet):
            return Memory()
        found = data.images.device
        is_there = found.type == device.type and device.index in (None, found.index) and not data.mapped
        permutation = 8 * sampler.size if device.type != "cpu" else 0  # on the CPU every loader has one
        return Memory(device=(0 if is_there else data.nbytes) + permutation)

    def batches(self, number: int, start: int) -> Batches:
        assert self.resident is not None
        return gather(self.resident, self.sampler, number, start)
