"""Loaders that decode the dataset once, and gather each batch by index: `ram`, `cache` and `gpu_slice`."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.registry import NoOptions
from vitmnist.runtime.device import Event, create_queue
from vitmnist.runtime.memory import check_fits
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import StoreOptions, as_contiguous_rows, gather_rows

CPU = torch.device("cpu")
MAX_PENDING_COPIES = 16
"""Maximum number of unfinished copies to a GPU. Steps of a millisecond need this many to cover a pause of the host."""


class HostLoader(Loader):
    """Gathers batches from rows in host memory or in a mapped file. On the CPU, contiguous batches are views.

    A GPU copies each batch asynchronously from page-locked memory, which torch reuses after the copy. A host that runs
    ahead of the GPU waits for its copies, so it uses no more memory.
    """

    def __init__(self, samples: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        samples.check_on_host()
        self.samples, self.queue = samples, create_queue(device)

    def batches(self, epoch: int, start: int) -> Batches:
        copies: deque[Event] = deque()
        for indices in self.sampler.batch_indices(epoch, start):
            if len(copies) == MAX_PENDING_COPIES:
                copies.popleft().synchronize()
            rows = gather_rows(self.samples.tensors, indices, out=self._empty_pinned() if self.queue.is_async else ())
            images, labels = map(self.queue.to_device, rows)
            copies.append(self.queue.record_event())
            yield images, labels

    def _empty_pinned(self) -> list[Tensor]:
        size = min(self.sampler.rank_batch_size, self.sampler.size)
        rows = map(as_contiguous_rows, self.samples.tensors)
        return [self.queue.empty_pinned((size, *tensor.shape[1:]), tensor.dtype) for tensor in rows]


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Stores the dataset in host memory; raises `ConfigError` for random samples, `OutOfSpaceError` if too large."""

    def __init__(self, options: NoOptions, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        check_fits("ram", source.nbytes_to_copy(CPU), CPU, advice="; try data/loader=cache or disk")
        super().__init__(source.store_all(StoreOptions()), sampler, device)
        self.decoded = self.samples


@dataclass
class CacheOptions:
    """See `conf/data/loader/cache.yaml`."""

    folder: str = DEFAULT_FOLDER


@LOADERS.register("cache", CacheOptions)
class CacheLoader(HostLoader):
    """Stores the dataset in a memory-mapped file: the system reads pages on demand, and drops them if memory is short.

    Raises the errors of `RamLoader`, and `DataError` if the folder cannot be written.
    """

    def __init__(
        self, options: CacheOptions, source: SampleSource, sampler: EpochSampler, device: torch.device
    ) -> None:
        super().__init__(source.store_all(StoreOptions(Path(options.folder).expanduser())), sampler, device)


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """Stores the dataset on the device, with the permutation of each epoch. No batch crosses the bus.

    On the CPU, nothing is copied, and contiguous batches are views. Each rank stores all samples.
    """

    takes_decoded = True

    def __init__(self, options: NoOptions, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        nbytes = source.nbytes_to_copy(device) + torch.int64.itemsize * len(source)  # with an epoch's permutation
        check_fits("gpu_slice", nbytes, device, advice="; try data/loader=ram, cache or disk")
        if not isinstance(source, TensorSet) or device.type == "cpu":  # A GPU reads mapped files without a host copy.
            source = source.store_all(StoreOptions())
        self.tensors = tuple(map(create_queue(device).to_device, source.tensors))

    def batches(self, epoch: int, start: int) -> Batches:
        for indices in self.sampler.batch_indices(epoch, start, self.tensors[0].device):
            images, labels = gather_rows(self.tensors, indices)
            yield images, labels
