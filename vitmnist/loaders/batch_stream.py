"""The batches of any iterable, epoch after epoch, timed in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from itertools import count, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader

from vitmnist.data.collate import map_tensors
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import SampleSource
from vitmnist.loaders.base import Batches, Loader
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.timer import EpochTimer

END = object()


class BatchStream:
    """Batches one after another; when an epoch ends, the next one begins.

    Args:
        source: a DataLoader, one of this project's loaders, or any other iterable. A generator has a single epoch.
        device: whose clock is used.
        epoch: yields the step's arguments for the epoch of this number. By default `source.epoch` of a `Loader`;
            other sources are iterated.
    """

    def __init__(
        self,
        source: Iterable[Any] | Loader,
        device: torch.device,
        epoch: Callable[[int], Iterable[Any]] | None = None,
    ) -> None:
        self.source, self.device = source, device
        self.first_batch_s: list[float] = []
        """Seconds from the start of each epoch to its first batch."""
        self.taken = 0
        self.times_epochs = False
        """Whether epochs are so short that they are timed as a whole."""
        self.workers: int = getattr(source, "num_workers", 0)
        self.buffered: int = getattr(source, "buffered", 0)
        """How many batches may be ready ahead of the consumer."""
        if isinstance(source, DataLoader):
            self.buffered = source.num_workers * (source.prefetch_factor or 0)
        self._epoch = epoch or (source.epoch if isinstance(source, Loader) else lambda number: source)
        self._epochs = count()
        self._iterator: Iterator[Any] | None = None
        self.length = _length(source)
        """Batches per epoch; None if it is not known before."""
        self._left: int | None = 0
        self._started: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is no batch left, and the source cannot begin again."""
        return self._iterator is None and self.taken > 0 and hasattr(self.source, "__next__")

    def take(self, size: int) -> Iterator[Any]:
        """At most `size` batches, up to the end of an epoch; begins a new one if the last has ended."""
        if self.has_ended:
            return
        if self._iterator is None:
            self._started, self._left = time.perf_counter(), self.length
            self._iterator = iter(self._epoch(next(self._epochs)))
        for _ in range(size):
            if (batch := next(self._iterator, END)) is END:
                self._iterator = None
                if self.length is not None and self._left and self._left > 0:  # the source has said that there are more
                    self.length -= self._left
                return
            if self._started is not None:
                self.first_batch_s.append(time.perf_counter() - self._started)
                self._started = None
            self.taken += 1
            self._left = None if self._left is None else self._left - 1
            yield batch

    def time_block(self, size: int, step: Callable[[Any], object] | None = None) -> tuple[float, float] | None:
        """Time `size` batches, alone or with the step.

        Batches that are ready or begun at the start arrive faster than they are made, and the first of an epoch arrives
        later than the others. So these go through the step first, and are not timed. Workers deliver in turn, so `size`
        is rounded up to give each the same number of batches. An epoch that is too short for this is timed as a whole,
        because its last batches are begun long before they are taken, and no others follow.

        Returns:
            Seconds per batch, and how many of them were spent waiting; None if there are no batches left.
        """
        size = -(-size // self.workers) * self.workers if self.workers else size
        ahead = self.buffered + max(self.workers, 1) if self.buffered else 0
        if self._left is not None and self._left < size + ahead:
            self._iterator = None
        ahead += self._iterator is None
        if self.length is not None and self.length < ahead + size:
            if self.buffered:
                self.times_epochs, self._iterator, ahead, size = True, None, 0, self.length
            else:
                ahead = min(ahead, self.length - 1)  # leaves at least one to time
                size = min(size, self.length - ahead)
        began = self.taken
        time_batches(self.take(ahead), self.device, step)
        before = self.taken
        seconds, waiting = time_batches(self.take(size), self.device, step)
        number = self.taken - before
        if self._left == 0:
            for _ in self.take(2):  # to the end, after a short batch, so that persistent workers stay for the next one
                pass
        if not number and self.taken > began and not self.has_ended:  # the epoch was shorter than the source has said
            return self.time_block(size, step)
        return (seconds / number, waiting / number) if number else None

    def close(self) -> None:
        """Drop the current epoch, and the workers that belong to it."""
        self._iterator = None


class ResidentBatch(Loader):
    """Repeats one batch that is already on the device, to time a model that never waits for data."""

    def __init__(self, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        batch = data.read(slice(0, min(sampler.batch_size, sampler.size)))
        self._batch: Any = map_tensors(backend_of(device).to_device, batch)

    def batches(self, number: int, start: int) -> Batches:
        yield from repeat(self._batch, len(self) - start)


def _length(source: Iterable[Any] | Loader) -> int | None:
    """Batches per epoch; for a `Loader`, a short last batch does not count, because its time would mislead."""
    if isinstance(source, Loader):
        sampler = source.sampler.global_sampler
        return sampler.size // sampler.batch_size or 1
    with suppress(TypeError):  # a DataLoader has `__len__`, but its sampler may not
        return len(source) if isinstance(source, Sized) else None
    return None


def time_batches(
    batches: Iterable[Any], device: torch.device, step: Callable[[Any], object] | None = None
) -> tuple[float, float]:
    """The seconds of a pass over batches, and how many of them it waited for data."""
    timer = EpochTimer(device)
    for batch in timer.waiting(batches):
        if step:
            step(batch)
    timer.stop()
    seconds = timer.seconds()
    return sum(seconds.values()), seconds["waiting"]
