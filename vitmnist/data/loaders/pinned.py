"""Batches that are gathered on the host and copied to the run's device: what `ram` and `cache` share."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.schema import Shuffle
from vitmnist.data.loaders.base import Batch, Batches, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.device import Accelerator, accelerator_of


class HostLoader(Loader):
    """Takes batches from arrays in host memory. On the CPU contiguous batches are views of them."""

    def __init__(self, arrays: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        arrays.check_on_host()
        self.arrays = TensorSet(arrays.images.detach(), arrays.labels.detach())
        self.accelerator = accelerator_of(device)
        self.staging = Staging(self.accelerator, self.arrays, min(sampler.batch_size, sampler.size))

    def batches(self, number: int, start: int) -> Batches:
        if self.accelerator.is_async:
            for indices in self.sampler.batches(number, start):
                yield self.staging.send(indices)
        else:
            yield from gather(self.arrays, self.sampler, number, start)


def gather(arrays: TensorSet, sampler: EpochSampler, number: int, start: int) -> Batches:
    """The batches of an epoch where the set is: views of it where they are contiguous, else gathered.

    `index_select` copies rows whole; `images[indices]`, which computes an address for each element, takes several
    times as long. Of labels, which are small, the call costs more than the bytes, so an epoch's are gathered at once.
    """
    images, labels = arrays.images, arrays.labels
    if sampler.shuffle == Shuffle.sample and labels.dim() == 1:
        indices = sampler.indices(number, start, images.device)
        ordered = labels.index_select(0, indices)
        for first in range(0, len(indices), sampler.batch_size):
            rows = slice(first, first + sampler.batch_size)
            yield images.index_select(0, indices[rows]), ordered[rows]
    else:
        for batch in sampler.batches(number, start, images.device):
            if isinstance(batch, slice):
                yield images[batch], labels[batch]
            else:
                yield images.index_select(0, batch), labels.index_select(0, batch)


class Staging:
    """A loader's page-locked buffers, one pool for all its epochs, out of which the device copies by itself.

    A buffer is filled again only when the copy out of it is over. There are `DEPTH` of them: a host that runs ahead
    of the device waits there, and its memory does not grow.
    """

    DEPTH = 4

    def __init__(self, accelerator: Accelerator, arrays: TensorSet, batch_size: int) -> None:
        self._accelerator = accelerator
        self._arrays = arrays.images, arrays.labels
        self._batch_size = batch_size
        self._made = 0
        self._free: deque[tuple[tuple[Tensor, ...], Any]] = deque()  # the oldest copy first
        self._lock = threading.Lock()

    def send(self, indices: slice | Tensor) -> Batch:
        """The batch of these indices, on its way to the device on the current stream."""
        buffers = self._buffers()
        try:
            sent = self._fill(buffers, indices)
        except BaseException:
            with self._lock:
                self._made -= 1  # the buffers go: nobody knows how far the device is with them
            raise
        with self._lock:
            self._free.append((buffers, self._accelerator.event()))
        return sent

    def _fill(self, buffers: tuple[Tensor, ...], indices: slice | Tensor) -> Batch:
        size = indices.stop - indices.start if isinstance(indices, slice) else len(indices)
        sent = []
        for array, buffer in zip(self._arrays, buffers, strict=True):
            rows = buffer[:size]
            if isinstance(indices, slice):
                rows.copy_(array[indices])
            else:
                torch.index_select(array, 0, indices, out=rows)
            sent.append(self._accelerator.upload(rows))
        return sent[0], sent[1]

    def _buffers(self) -> tuple[Tensor, ...]:
        with self._lock:
            used = self._free.popleft() if self._free else None
            if used and self._made < self.DEPTH and not self._accelerator.reached(used[1]):
                self._free.appendleft(used)
                used = None
            if not used:  # also where as many iterators are at it as there are buffers
                self._made += 1
        if used:
            buffers, event = used
            self._accelerator.synchronize(event)
            return buffers
        shapes = [(self._batch_size, *array.shape[1:]) for array in self._arrays]
        with torch.inference_mode(False):  # they will also be filled outside of it
            return tuple(
                self._accelerator.pinned(shape, array.dtype) for shape, array in zip(shapes, self._arrays, strict=True)
            )
