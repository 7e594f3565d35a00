"""The batches of any iterable, epoch after epoch, timed in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from vitmnist.data.from_dataloader import ReplacedDataLoader
from vitmnist.data.loaders.base import Loader
from vitmnist.data.loaders.timing import time_batches
from vitmnist.diagnosis.result import Alternative, Figure
from vitmnist.errors import UserError, first_line

END = object()

Block = tuple[float, float]
"""Seconds per batch, and how many of them were spent waiting."""


class BatchStream:
    """Batches one after another; when an epoch ends, the next one begins.

    Args:
        source: a DataLoader, one of this project's loaders, or any other iterable. A generator has a single epoch.
        device: whose clock is used.
    """

    def __init__(self, source: Iterable[Any] | Loader, device: torch.device) -> None:
        self.source, self.device = source, device
        self.first_batch_s: list[float] = []
        """Seconds from the start of each epoch to its first batch."""
        self.taken = 0
        self.error: Exception | None = None
        """What the source raised; an exception of the step is another one."""
        self._epochs = count()
        self._iterator: Iterator[Any] | None = None
        self._length = len(source) if isinstance(source, Sized) else None
        self._left: int | None = 0
        self._started: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is no batch left, and the source cannot begin again."""
        return self._iterator is None and self.taken > 0 and hasattr(self.source, "__next__")

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
        if self.has_ended:
            return
        try:
            if self._iterator is None:
                self._started, self._left = time.perf_counter(), self._length
                source = self.source
                self._iterator = source.epoch(next(self._epochs)) if isinstance(source, Loader) else iter(source)
            for _ in range(size):
                if (batch := next(self._iterator, END)) is END:
                    self._iterator = None
                    return
                if self._started is not None:
                    self.first_batch_s.append(time.perf_counter() - self._started)
                    self._started = None
                self.taken += 1
                self._left = None if self._left is None else self._left - 1
                yield batch
        except Exception as error:
            self.error = error
            raise

    def time_block(self, size: int, step: Callable[[Any], object] | None = None) -> Block | None:
        """Time `size` batches, alone or with the step; None if there are no batches left.

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
        time_batches(self.take(ahead), self.device, step)
        if self._left is not None:
            size = min(size, self._left)  # beyond the last batch, the workers' end would be timed too
        before = self.taken
        seconds, waiting = time_batches(self.take(size), self.device, step)
        number = self.taken - before
        return (seconds / number, waiting / number) if number else None

    def close(self) -> None:
        """Drop the current epoch, and the workers that belong to it."""
        self._iterator = None


@dataclass
class Timed:
    """Batches, and a step over each, whose time is taken in blocks that take turns with those of others.

    Args:
        step: None to time loading alone.
        row: what is filled in, if this is another way to load; an error of the loader then refuses it alone.
        cores: processor cores that were busy in each block.
    """

    stream: BatchStream
    step: Callable[[Any], object] | None = None
    row: Alternative | None = None
    blocks: list[Block] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def time_block(self, size: int) -> None:
        """Add a block of `size` batches, unless there are none left."""
        if self.row and self.row.refused:
            return
        started, cpu_s = time.perf_counter(), _cpu_seconds()
        try:
            block = self.stream.time_block(size, self.step)
        except Exception as error:  # a worker may fail in any way
            if not self.row or error is not self.stream.error:
                raise
            self.row.refused = reason(error)
            self.stream.close()
            return
        if block:
            self.blocks.append(block)
            self.cores.append((_cpu_seconds() - cpu_s) / (time.perf_counter() - started))

    def complete_row(self, dataloader: DataLoader[Any] | None) -> None:
        """Fill in what was measured, for as many batches per epoch as the DataLoader has."""
        row, first_batch_s = self.row, self.stream.first_batch_s
        if row is None or row.refused or dataloader is None:
            return
        if not self.blocks:
            row.refused = "it gave no batch"
            return
        row.batch_s, row.waiting_s = (Figure.of(values) for values in zip(*self.blocks, strict=True))
        row.epoch_s = median(first_batch_s) + row.batch_s.median * (len(dataloader) - 1)
        row.set_up_s = first_batch_s[0] if row.set_up_s is None else row.set_up_s


def reason(error: Exception) -> str:
    """Why a loader is refused, in one line."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def _cpu_seconds() -> float:
    """Processor time of this process and its living children so far."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()  # in steps of 10 ms
            total += times.user + times.system
    return total
