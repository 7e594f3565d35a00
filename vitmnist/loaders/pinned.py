"""Batches gathered on the host and copied to the run's device: the common part of `ram` and `cache`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from vitmnist.data.channels import rows_in_memory
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet, gather_rows
from vitmnist.loaders.base import Batch, Batches, Loader
from vitmnist.runtime.backend import Backend, backend_of


class HostLoader(Loader):
    """Takes batches from tensors in host memory. On the CPU contiguous batches are views of them."""

    def __init__(self, tensors: TensorSet, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        tensors.check_on_host()
        self.tensors = TensorSet(tensors.images.detach(), tensors.labels.detach(), mapped=tensors.mapped)
        self.backend = backend_of(device)
        self.buffers = PinnedBuffers(self.backend, self.tensors, min(sampler.batch_size, sampler.size))

    def batches(self, number: int, start: int) -> Batches:
        if self.backend.is_async:
            for indices in self.sampler.batches(number, start):
                yield self.buffers.send(indices)
        else:
            yield from gather(self.tensors, self.sampler, number, start)


def gather(tensors: TensorSet, sampler: EpochSampler, number: int, start: int) -> Batches:
    """The batches of an epoch on the device of the set: views where they are contiguous, else gathered.

    `index_select` copies whole rows; `images[indices]` computes an address per element and takes several times as
    long. For labels, which are small, the call costs more than the copy, so those of an epoch are gathered at once.
    """
    images, labels = tensors.images, tensors.labels
    if sampler.shuffle == "sample" and labels.dim() == 1:
        indices = sampler.indices(number, start, images.device)
        ordered = labels.index_select(0, indices)
        for first in range(0, len(indices), sampler.batch_size):
            rows = slice(first, first + sampler.batch_size)
            yield tensors.checked(gather_rows(images, indices[rows]), indices[rows]), ordered[rows]
    else:
        yield from map(tensors.read, sampler.batches(number, start, images.device))


class PinnedBuffers:
    """A loader's page-locked buffers, from which the device copies asynchronously; one pool for all epochs.

    A buffer is refilled only after the copy out of it has finished. There are `DEPTH` of them, so a host that runs
    ahead of the device waits here, and its memory does not grow.
    """

    DEPTH = 4

    def __init__(self, backend: Backend, tensors: TensorSet, batch_size: int) -> None:
        self._backend = backend
        self._set = tensors
        self._tensors = rows_in_memory(tensors.images), tensors.labels
        self._is_permuted = self._tensors[0] is not tensors.images
        self._batch_size = batch_size
        self._count = 0
        self._sent: deque[tuple[tuple[Tensor, ...], Any]] = deque()  # (buffers, event after their copy), oldest first
        self._lock = threading.Lock()

    def send(self, indices: slice | Tensor) -> Batch:
        """Queue a copy of the batch with these indices to the device, on the current stream."""
        buffers = self._acquire()
        try:
            images, labels = (
                _fill(buffer, tensor, indices) for tensor, buffer in zip(self._tensors, buffers, strict=True)
            )
            images = images.permute(0, 3, 1, 2) if self._is_permuted else images
            batch = tuple(map(self._backend.to_device, (self._set.checked(images, indices), labels)))
        except BaseException:
            with self._lock:
                self._count -= 1  # the buffers are dropped: a copy out of them may be under way
            raise
        with self._lock:
            self._sent.append((buffers, self._backend.record_event()))
        return batch[0], batch[1]

    def _acquire(self) -> tuple[Tensor, ...]:
        with self._lock:
            # With more live iterators than buffers, all of them may be taken: then there is one more.
            if self._sent and (self._count >= self.DEPTH or self._backend.is_done(self._sent[0][1])):
                buffers, event = self._sent.popleft()
            else:
                buffers, event = (), None
                self._count += 1
        if buffers:
            self._backend.synchronize(event)
            return buffers
        with torch.inference_mode(False):  # the buffers are also filled outside of inference mode
            return tuple(
                self._backend.empty_pinned((self._batch_size, *tensor.shape[1:]), tensor.dtype)
                for tensor in self._tensors
            )


def _fill(buffer: Tensor, tensor: Tensor, indices: slice | Tensor) -> Tensor:
    """Copy rows of `tensor` into the first rows of `buffer`, and return those."""
    if isinstance(indices, slice):
        return buffer[: indices.stop - indices.start].copy_(tensor[indices])
    return torch.index_select(tensor, 0, indices, out=buffer[: len(indices)])
