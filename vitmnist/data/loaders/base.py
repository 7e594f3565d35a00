"""What every loader promises, and the registry of those that do."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.registry import Registry
from vitmnist.runtime.memory import Memory

Data = TensorSet | Dataset[Any]
"""What a loader loads: a split or a pair of tensors, or a map-style data set that is read sample by sample."""

Batch = tuple[Tensor, Tensor]
"""Images `[B, C, H, W]` and labels int64 `[B]`, both on the run's device. Images are uint8 as stored, or float32 and
normalised. A batch may be a view of the loader's own set: read it, do not write to it.

Of a pair of tensors or a data set of one's own, a batch has the shapes and dtypes that it has there; `disk`, and
`prefetch` of it, also deliver samples that are no pairs, nested as they are (dict, list, tuple, None, str)."""

Batches = Generator[Batch, None, None]


class Loader(ABC):
    """Delivers the batches that an `EpochOrder` names, on a device.

    A subclass is built with (options, data, order, device) and writes `batches`. What an epoch needs belongs to its
    generator, which gives it back in a `finally`; what all epochs share belongs to the loader, which gives it back in
    `close`. Whatever goes wrong while a batch is made is raised, as it is, where that batch would have come.
    """

    resident: TensorSet | None = None
    """The set, where it lies on the run's device as a whole; None where batches are brought there."""

    buffered: int = 0
    """How many batches may be finished ahead of the one that is taken."""

    choice: object = None
    """How `auto` came to this loader; None where it was asked for by name."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler
        self._live: weakref.WeakSet[Batches] = weakref.WeakSet()
        self._lock = threading.Lock()  # prefetching asks for epochs in threads
        # Also at the end of the interpreter, while threads and processes can still be told to stop.
        weakref.finalize(self, _close_all, self._live, self._lock)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.sampler)

    def epoch(self, number: int, start: int = 0) -> Batches:
        """The batches of epoch `number` from batch `start` on: a pure function of the order's seed and the number.

        Iterators that live at the same time do not disturb each other. One that is abandoned is closed by Python as
        soon as nothing refers to it.
        """
        iterator = self._held(number, start)
        with self._lock:
            self._live.add(iterator)
        return iterator

    def _held(self, number: int, start: int) -> Batches:
        """The batches; and the loader, which must not be collected, and closed, while they are taken."""
        yield from self.batches(number, start)

    @classmethod
    def needs(cls, options: Any, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """The memory that the loader would take for itself, beside a few batches."""
        return Memory()

    @abstractmethod
    def batches(self, number: int, start: int) -> Batches:
        """The generator behind `epoch`."""

    def close(self) -> None:
        """End the iterators that still live, and release what the loader owns."""
        _close_all(self._live, self._lock)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _close_all(iterators: weakref.WeakSet[Batches], lock: threading.Lock) -> None:
    with lock:
        live = list(iterators)
    for iterator in live:
        with suppress(ValueError):  # it runs in another thread right now, which will close it
            iterator.close()


LOADERS: Registry[Loader] = Registry("data/loader")
register = LOADERS.register


def needs_of(values: Mapping[str, Any], data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
    """The memory that the loader which `values["name"]` names would take for itself."""
    builder, options = LOADERS.member(values)
    needs = getattr(builder, "needs", Loader.needs)  # a function that builds a loader cannot tell
    memory: Memory = needs(options, data, sampler, device)
    return memory
