"""The batches of any iterable, epoch after epoch, timed in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader

from vitmnist.data.from_dataloader import ReplacedDataLoader
from vitmnist.data.loaders.base import Loader
from vitmnist.data.loaders.timing import time_batches

END = object()


class BatchStream:
    """Batches one after another; when an epoch ends, the next one begins.

    Args:
        source: a DataLoader, one of this project's loaders, or any other iterable. A generator has a single epoch.
    """

    def __init__(self, source: Iterable[Any] | Loader) -> None:
        self.first_batch_s: list[float] = []
        """Seconds from the start of each epoch to its first batch."""
        self.taken = 0
        self.source, self._epochs = source, count()
        self._iterator: Iterator[Any] | None = None
        self._length = len(source) if isinstance(source, Sized) else None
        self._left: int | None = 0
        self._started = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether there is no batch left, and the source cannot begin again."""
        return self._iterator is None and self.taken > 0 and _is_iterator(self.source)

    @property
    def workers(self) -> int:
        """Worker processes, which deliver their batches in turn."""
        return self.buffered if isinstance(self.source, Loader) else getattr(self.source, "num_workers", 0)

    @property
    def buffered(self) -> int:
        """How many batches may be ready ahead of the consumer."""
        if isinstance(self.source, DataLoader):
            return self.workers * (self.source.prefetch_factor or 0)
        return self.source.buffered if isinstance(self.source, (Loader, ReplacedDataLoader)) else 0

    def take(self, size: int) -> Iterator[Any]:
        """At most `size` batches, up to the end of an epoch; begins a new one if the last has ended."""
        if self._iterator is None:
            self._begin_epoch()
        for _ in range(size):
            batch = next(self._iterator, END) if self._iterator is not None else END
            if batch is END:
                self._iterator = None
                return
            if self._started:
                self.first_batch_s.append(time.perf_counter() - self._started)
                self._started = 0.0
            self.taken += 1
            self._left = None if self._left is None else self._left - 1
            yield batch

    def time_block(
        self, size: int, device: torch.device, step: Callable[[Any], object] | None = None
    ) -> tuple[float, float] | None:
        """Seconds per batch, and how many of them the step waits; None if there are no batches left.

        Batches that are ready at the start, or begun, arrive faster than they are made, and the first of an epoch later
        than the others. So these go through the step first, and are not timed. Workers deliver in turn, so each of them
        delivers the same number of batches of a block.
        """
        size = -(-size // self.workers) * self.workers if self.workers else size
        ahead = self.buffered + max(self.workers, 1) if self.buffered else 0
        if self._left is not None and self._left < size + ahead:
            self._iterator = None
        ahead += self._iterator is None
        if self._length is not None:
            ahead = min(ahead, self._length - 1)  # leaves at least one to time
        time_batches(self.take(ahead), device, step)
        if self._left is not None:
            size = min(size, self._left)  # beyond the last batch, the workers' end would be timed too
        before = self.taken
        seconds, waiting = time_batches(self.take(size), device, step)
        number = self.taken - before
        return (seconds / number, waiting / number) if number else None

    def close(self) -> None:
        """Drop the current epoch, and the workers that belong to it."""
        self._iterator = None

    def _begin_epoch(self) -> None:
        if self.has_ended:
            return
        self._left, self._started = self._length, time.perf_counter()
        if isinstance(self.source, Loader):
            self._iterator = self.source.epoch(next(self._epochs))
        else:
            self._iterator = iter(self.source)


def _is_iterator(source: object) -> bool:
    return hasattr(source, "__next__")
