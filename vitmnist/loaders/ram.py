"""The whole set is in host memory; a batch is gathered there and copied to the run's device, as by `cache`."""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.loaders.base import LOADERS, Batch, Batches, Loader, Place
from vitmnist.registry import NoOptions
from vitmnist.runtime.device import Backend, Event, backend_of
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.store.rows import Rows


class HostLoader(Loader):
    """Takes batches from rows in host memory or in a file. On the CPU contiguous batches are views of them."""

    def __init__(self, tensors: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        tensors.check_on_host()
        self.rows, self.backend = tensors.rows, backend_of(device)
        self.buffers = PinnedBuffers(self.backend, self.rows, min(sampler.batch_size, sampler.size))

    def batches(self, number: int, start: int) -> Batches:
        if self.backend.is_async:
            for indices in self.sampler.batches(number, start):
                yield self.buffers.send(indices)
        else:
            yield from gather(self.rows, self.sampler, number, start)


def gather(rows: Rows, sampler: EpochSampler, number: int, start: int) -> Batches:
    """The batches of an epoch on the device of images and labels: views where they are contiguous, else gathered.

    `index_select` copies whole rows; `images[indices]` computes an address per element and takes several times as
    long. For labels, which are small, the call costs more than the copy, so those of an epoch are gathered at once.
    """
    images, labels = rows.tensors
    if sampler.shuffle == "sample" and labels.dim() == 1:
        indices, image_rows = sampler.indices(number, start, images.device), Rows((images,))
        ordered = labels.index_select(0, indices)
        for first in range(0, len(indices), sampler.batch_size):
            span = slice(first, first + sampler.batch_size)
            yield image_rows.gather(indices[span])[0], ordered[span]
    else:
        for of_batch in sampler.batches(number, start, images.device):
            batch_images, batch_labels = rows.gather(of_batch)
            yield batch_images, batch_labels


class PinnedBuffers:
    """A loader's page-locked buffers, from which the device copies asynchronously; one pool for all epochs.

    A buffer is refilled only after the copy out of it has finished. There are `DEPTH` of them, so a host that runs
    ahead of the device waits here, and its memory does not grow.
    """

    DEPTH = 4

    def __init__(self, backend: Backend, rows: Rows, batch_size: int) -> None:
        self._backend, self._rows, self._batch_size = backend, rows, batch_size
        self._count = 0
        self._sent: deque[tuple[tuple[Tensor, ...], Event]] = deque()  # (buffers, event after their copy), oldest first
        self._lock = threading.Lock()

    def send(self, indices: slice | Tensor) -> Batch:
        """Queue a copy of the batch with these indices to the device, on the current stream."""
        buffers = self._acquire()
        try:
            images, labels = map(self._backend.to_device, self._rows.gather(indices, out=buffers))
        except BaseException:
            with self._lock:
                self._count -= 1  # the buffers are dropped: a copy out of them may be under way
            raise
        with self._lock:
            self._sent.append((buffers, self._backend.record_event()))
        return images, labels

    def _acquire(self) -> tuple[Tensor, ...]:
        oldest = None
        with self._lock:
            # With more live iterators than buffers, all of them may be taken: then there is one more.
            if self._sent and (self._count >= self.DEPTH or self._sent[0][1].query()):
                oldest = self._sent.popleft()
            else:
                self._count += 1
        if oldest:
            buffers, event = oldest
            event.synchronize()
            return buffers
        with torch.inference_mode(False):  # the buffers are also filled outside of inference mode
            return self._rows.buffers(self._batch_size, self._backend.empty_pinned)


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Reads a map-style dataset into memory first, sample by sample.

    Raises:
        ConfigError: its samples are random.
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    keeps = Place.HOST

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        needs = Memory(host=data.bytes_to_load(torch.device("cpu")))
        check_fits("ram", needs, device, others=("cache", "disk"))
        self.decoded = data.in_memory()
        super().__init__(self.decoded, sampler, device)
