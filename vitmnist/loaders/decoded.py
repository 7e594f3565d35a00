"""Loaders of a set that is decoded once: `ram`, `cache` and `gpu_slice` gather each batch of it by index."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.loaders.base import LOADERS, Batches, LoadedBatch, Loader, needs_of
from vitmnist.registry import NoOptions
from vitmnist.runtime.device import Backend, Event, backend_of
from vitmnist.runtime.files import expand_home
from vitmnist.runtime.memory import check_fits
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import Location, Storage, gather_rows, row_buffers


class HostLoader(Loader):
    """Gathers batches from rows in host memory or in a file. On the CPU, contiguous batches are views of the rows."""

    def __init__(self, tensors: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        tensors.check_on_host()
        self.tensors, self.backend = tensors.tensors, backend_of(device)
        self.buffers = PinnedBuffers(self.backend, self.tensors, min(sampler.rank_batch_size, sampler.size))

    def batches(self, epoch: int, start: int) -> Batches:
        if self.backend.is_async:
            for indices in self.sampler.batches(epoch, start):
                yield self.buffers.send(indices)
        else:
            yield from gather(self.tensors, self.sampler, epoch, start)


def gather(tensors: tuple[Tensor, ...], sampler: EpochSampler, epoch: int, start: int) -> Batches:
    """The batches of an epoch on the device of the tensors: views of contiguous rows, copies of others.

    `index_select` copies whole rows; `images[indices]` computes an address per element and takes several times as
    long. For labels, which are small, the call costs more than the copy, so they are gathered once for an epoch.
    """
    images, labels = tensors
    if sampler.shuffle == "sample" and labels.dim() == 1:
        indices = sampler.indices(epoch, start, images.device)
        ordered = labels.index_select(0, indices)
        for first in range(0, len(indices), sampler.rank_batch_size):
            span = slice(first, first + sampler.rank_batch_size)
            yield gather_rows([images], indices[span])[0], ordered[span]
    else:
        for batch_indices in sampler.batches(epoch, start, images.device):
            batch_images, batch_labels = gather_rows(tensors, batch_indices)
            yield batch_images, batch_labels


class PinnedBuffers:
    """A loader's page-locked buffers, from which the device copies asynchronously; one pool for all epochs.

    A buffer is refilled only after the copy out of it has finished. There are `DEPTH` of them, and one more for each
    thread that fills another, so a host that runs ahead of the device waits here, and its memory does not grow.
    """

    DEPTH = 4

    def __init__(self, backend: Backend, tensors: tuple[Tensor, ...], batch_size: int) -> None:
        self._backend, self._tensors, self._batch_size = backend, tensors, batch_size
        # Buffers with the event that follows the copy out of them, oldest first.
        self._sent: deque[tuple[tuple[Tensor, ...], Event]] = deque()
        self._lock = threading.Lock()

    def send(self, indices: slice | Tensor) -> LoadedBatch:
        """Queue a copy of the batch with these indices to the device, on the current stream."""
        with self._lock:
            oldest = self._sent.popleft() if len(self._sent) >= self.DEPTH else None
        if oldest:
            buffers, event = oldest
            event.synchronize()
        else:
            with torch.inference_mode(False):  # The buffers are also filled outside of inference mode.
                buffers = row_buffers(self._tensors, self._batch_size, self._backend.empty_pinned)
        # If this fails, the buffers are dropped: a copy out of them may be under way.
        images, labels = map(self._backend.to_device, gather_rows(self._tensors, indices, out=buffers))
        self._sent.append((buffers, self._backend.record_event()))
        return images, labels


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Reads a map-style dataset into memory first, sample by sample.

    Raises:
        ConfigError: its samples are random.
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    keeps = Storage.HOST

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        check_fits("ram", needs_of("ram", data, device), device, alternatives=("cache", "disk"))
        self.decoded = data.decode_to(Location(Storage.HOST))
        super().__init__(self.decoded, sampler, device)


@dataclass
class CacheOptions:
    """See `conf/data/loader/cache.yaml`."""

    folder: str = DEFAULT_FOLDER
    fingerprint: str | None = None


@LOADERS.register("cache", CacheOptions)
class CacheLoader(HostLoader):
    """For sets larger than memory: the system reads pages on demand, and drops them when memory is short.

    Raises:
        ConfigError: the samples of a map-style dataset are random.
        DataError: the folder cannot be written.
        DoesNotFitError: its disk has too little room.
    """

    keeps = Storage.FILE

    def __init__(self, options: CacheOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        location = Location(Storage.FILE, folder=expand_home(options.folder), fingerprint=options.fingerprint)
        super().__init__(data.decode_to(location), sampler, device)


@LOADERS.register("gpu_slice")
class GpuSliceLoader(Loader):
    """Copies the set to the device once, and each epoch's permutation; no batch crosses the bus.

    On the CPU the set is not copied. Contiguous batches are views. Each of several ranks keeps the set on its device.

    Raises:
        ConfigError: the samples of a map-style dataset are random.
        DoesNotFitError: the device's memory is too small.
    """

    keeps = Storage.DEVICE

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        check_fits("gpu_slice", needs_of("gpu_slice", data, device), device, alternatives=("ram", "cache", "disk"))
        if not isinstance(data, TensorSet) or device.type == "cpu":  # Others are copied to the device as they are.
            data = data.decode_to(Location(Storage.HOST))
        self.tensors = tuple(map(backend_of(device).to_device, data.tensors))

    def batches(self, epoch: int, start: int) -> Batches:
        yield from gather(self.tensors, self.sampler, epoch, start)
