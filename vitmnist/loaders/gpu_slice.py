"""The set is in the memory of the run's device; a batch is one gather there, or a slice."""

from __future__ import annotations

import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS, Batches, Loader, Place
from vitmnist.loaders.ram import gather
from vitmnist.registry import NoOptions
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.store.rows import Rows

INDEX_NBYTES = 8  # int64, for each image of an epoch


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """Copies the set to the device once, and each epoch's permutation; no batch crosses the bus.

    On the CPU the set is not copied. Contiguous batches are views. Each of several ranks keeps the set on its device.

    Raises:
        ConfigError: a dataset that is read sample by sample.
        DoesNotFitError: the device's memory is too small.
    """

    keeps = Place.DEVICE

    def __init__(self, options: NoOptions, data: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        check_fits("gpu_slice", self.needs(options, data, sampler, device), device, others=("ram", "cache", "disk"))
        rows = data.in_memory().rows if device.type == "cpu" else data.rows
        self.rows = Rows(tuple(map(backend_of(device).to_device, rows.gather(slice(None)))))

    @classmethod
    def needs(cls, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> Memory:
        """The set, unless it is on the device already, and the indices of an epoch."""
        if not data.is_decoded:
            raise ConfigError(
                "gpu_slice: keeps a set of tensors on the device, and this one is read sample by sample; "
                "give it as (images, labels), or choose ram, cache, disk or prefetch"
            )
        return Memory(device=INDEX_NBYTES * len(data) + data.bytes_to_load(device))

    def batches(self, number: int, start: int) -> Batches:
        return gather(self.rows, self.sampler, number, start)
