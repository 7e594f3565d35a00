"""Loaders that decode the dataset once, and gather each batch by index: `ram`, `cache` and `gpu_slice`."""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.loaders.base import LOADERS, Batches, LoadedBatch, Loader, check_memory
from vitmnist.registry import NoOptions
from vitmnist.runtime.device import DeviceQueue, Event, create_queue
from vitmnist.runtime.files import expand_home
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import Placement, StoreOptions, as_contiguous_rows, gather_rows


class HostLoader(Loader):
    """Gathers batches from rows in host memory or in a mapped file. On the CPU, contiguous batches are views."""

    def __init__(self, tensors: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        tensors.check_on_host()
        self.tensors, self.queue = tensors.tensors, create_queue(device)
        self.buffers = PinnedBuffers(self.queue, self.tensors, min(sampler.rank_batch_size, sampler.size))

    def batches(self, epoch: int, start: int) -> Batches:
        for indices in self.sampler.batches(epoch, start):
            if self.queue.is_async:
                yield self.buffers.send(indices)
            else:
                images, labels = gather_rows(self.tensors, indices)
                yield images, labels


class PinnedBuffers:
    """A loader's page-locked buffers, from which the device copies asynchronously; one pool for all epochs.

    A buffer is refilled only after the copy from it has finished. At most `depth` copies are in flight, and each
    calling thread fills one more buffer. A host that runs ahead of the device blocks here; it uses no more memory.
    Steps on small batches take about a millisecond, so only many batches ahead cover a pause of the host.
    """

    MIN_DEPTH, MAX_DEPTH = 4, 16
    MEMORY = 2**24
    """The number of bytes that all buffers together may have, from `MIN_DEPTH` on."""

    def __init__(self, queue: DeviceQueue, tensors: tuple[Tensor, ...], batch_size: int) -> None:
        self._queue, self._tensors, self._batch_size = queue, tensors, batch_size
        sample_bytes = sum(rows[:1].nbytes for rows in map(as_contiguous_rows, tensors))
        self.depth = max(self.MIN_DEPTH, min(self.MAX_DEPTH, self.MEMORY // max(1, sample_bytes * batch_size)))
        # The buffers, oldest first, each with an event recorded after the copy from it.
        self._in_flight: deque[tuple[tuple[Tensor, ...], Event]] = deque()
        self._lock = threading.Lock()

    def send(self, indices: slice | Tensor) -> LoadedBatch:
        """Queue a copy of the batch with these indices to the device, on the current stream."""
        with self._lock:
            oldest = self._in_flight.popleft() if len(self._in_flight) >= self.depth else None
        if oldest:
            buffers, event = oldest
            event.synchronize()
        else:
            with torch.inference_mode(False):  # Buffers are also filled outside of inference mode.
                buffers = tuple(
                    self._queue.empty_pinned((self._batch_size, *rows.shape[1:]), rows.dtype)
                    for rows in map(as_contiguous_rows, self._tensors)
                )
        # If this fails, the buffers are dropped: a copy from them can still be in progress.
        images, labels = map(self._queue.to_device, gather_rows(self._tensors, indices, out=buffers))
        self._in_flight.append((buffers, self._queue.record_event()))
        return images, labels


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Keeps the dataset in host memory; raises `ConfigError` for random samples, `OutOfSpaceError` if too large."""

    placement = Placement.HOST

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        check_memory("ram", self.placement, data, device, advice="; try data/loader=cache or disk")
        self.host_samples = data.store_all(StoreOptions(Placement.HOST))
        super().__init__(self.host_samples, sampler, device)


@dataclass
class CacheOptions:
    """See `conf/data/loader/cache.yaml`."""

    folder: str = DEFAULT_FOLDER


@LOADERS.register("cache", CacheOptions)
class CacheLoader(HostLoader):
    """Keeps the dataset in a memory-mapped file: the system reads pages on demand, and drops them if memory is short.

    Raises the errors of `RamLoader`, and `DataError` if the folder cannot be written.
    """

    placement = Placement.FILE

    def __init__(self, options: CacheOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        in_file = StoreOptions(Placement.FILE, expand_home(options.folder))
        super().__init__(data.store_all(in_file), sampler, device)


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """Keeps the dataset on the device, with the permutation of each epoch. No batch crosses the bus.

    On the CPU, nothing is copied, and contiguous batches are views. Each rank keeps all samples.
    """

    placement = Placement.DEVICE

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        check_memory("gpu_slice", self.placement, data, device, advice="; try data/loader=ram, cache or disk")
        if not isinstance(data, TensorSet) or device.type == "cpu":  # A device reads mapped files without a host copy.
            data = data.store_all(StoreOptions(Placement.HOST))
        self.tensors = tuple(map(create_queue(device).to_device, data.tensors))

    def batches(self, epoch: int, start: int) -> Batches:
        for indices in self.sampler.batches(epoch, start, self.tensors[0].device):
            images, labels = gather_rows(self.tensors, indices)
            yield images, labels
