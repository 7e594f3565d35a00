"""The whole set lives on the run's device; a batch is one gather there, or a slice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from vitmnist.data.arrays import Arrays
from vitmnist.data.loaders.contract import LOADERS, Batches, Data, Loader
from vitmnist.data.loaders.host import gather
from vitmnist.data.loaders.ram import in_memory
from vitmnist.data.order import EpochOrder
from vitmnist.data.shares import RankOrder, ShardOrder
from vitmnist.errors import ConfigError
from vitmnist.memory import Memory, check_fits


class Placement(str, Enum):
    """What of the set is on the device of each of several processes."""

    auto = "auto"
    replicate = "replicate"
    shard = "shard"


@dataclass
class GpuSliceOptions:
    """See `conf/data/loader/gpu_slice.yaml`. Whoever builds the loader has decided `auto`, by the order he gives it."""

    placement: Placement = Placement.auto


@LOADERS.register("gpu_slice", GpuSliceOptions)
class GpuSliceLoader(Loader):
    """No batch ever crosses the bus: the set does once, as it is stored, and each epoch's permutation does.

    On the CPU the set stays where it is. Contiguous batches are views of it. Of a `ShardOrder` only the shard is kept.

    Raises:
        ConfigError: a data set that is read sample by sample.
        DoesNotFitError: the device's memory is too small for the set.
    """

    def __init__(self, options: GpuSliceOptions, data: Data, order: EpochOrder, device: torch.device) -> None:
        if not isinstance(data, Arrays):
            raise ConfigError(
                "gpu_slice keeps a set of tensors on the device, and this one is read sample by sample; "
                "give it as (images, labels), or choose ram, cache, disk or prefetch"
            )
        if options.placement == Placement.shard and isinstance(order, RankOrder):
            raise ConfigError("placement=shard: is for data/loader=gpu_slice itself, not within another loader")
        super().__init__(order)
        check_fits("gpu_slice", self.needs(options, data, order, device), device, others=("ram", "cache", "disk"))
        arrays = in_memory(data, order.seed) if device.type == "cpu" else data
        rows = _rows(order)
        self._kept = Arrays(arrays.images[rows].detach().to(device), arrays.labels[rows].detach().to(device))
        if isinstance(order, ShardOrder):
            self._within: EpochOrder = order.within
        else:
            self._within, self.resident = order, self._kept

    @classmethod
    def needs(cls, options: GpuSliceOptions, data: Data, order: EpochOrder, device: torch.device) -> Memory:
        """The set, or a shard of it, and the permutation of an epoch; what is on the device already takes no more."""
        if not isinstance(data, Arrays):
            return Memory()
        place = data.images.device
        there = place.type == device.type and device.index in (None, place.index) and not data.mapped
        permutation = 8 * order.size if device.type != "cpu" else 0  # on the CPU every loader has one
        rows = _rows(order)
        size = data.images[rows].nbytes + data.labels[rows].nbytes
        return Memory(device=(0 if there else size) + permutation)

    def batches(self, number: int, start: int) -> Batches:
        return gather(self._kept, self._within, number, start)


def _rows(order: EpochOrder) -> slice:
    """The images that an order is about."""
    return slice(order.first, order.first + order.size) if isinstance(order, ShardOrder) else slice(None)
