"""The contract of a loader, and the registry of loaders.

To add a loader, write a module in this folder that registers a subclass of `Loader`, or a function that returns one,
and its YAML file in `conf/data/loader/`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.registry import ConfigGroup

LoadedBatch = tuple[Tensor, Tensor]
"""Images `[B, C, H, W]`, uint8 or normalised float32, and labels int64 `[B]`, both on the run's device. A batch can be
a view of the dataset: do not write to it. Other tensors and datasets keep their shapes and dtypes. `disk`, and
`prefetch` over it, also deliver samples that are not pairs (dict, list, tuple, None, str)."""

Batches = Generator[LoadedBatch, None, None]


class Loader(AbstractContextManager["Loader"], ABC):
    """Delivers the batches of a sampler on a device.

    A subclass is built from (options, source, sampler, device) and implements `batches`. Each generator acquires its
    own resources and releases them in a `finally`; `close` releases the shared resources. If a batch fails, its
    exception is raised unchanged.
    """

    takes_decoded: ClassVar[bool] = False
    """Whether `auto` may build the loader from samples that another one has decoded; a function can have this too."""
    decoded: TensorSet | None = None
    """All samples, if the loader stores them in host memory; `auto` builds others from them."""
    batches_ahead: int = 0
    """Maximum number of batches prepared ahead of the consumer."""
    num_workers: int = 0
    """Number of processes that make batches, in turn."""
    resolved_options: Mapping[str, Any] = {}
    """The values of options that were `auto`; a run logs and records them."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler
        self._live_iterators: weakref.WeakSet[Batches] = weakref.WeakSet()
        # This also runs at interpreter exit, while threads and processes can still be stopped.
        weakref.finalize(self, _close_all, self._live_iterators)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0) -> Batches:
        """Yield the batches of an epoch from batch `start` on: a pure function of the sampler's seed and the epoch.

        Live iterators are independent. An abandoned iterator is closed when it is garbage-collected.
        """
        batches = self.batches(epoch, start)
        self._live_iterators.add(batches)
        return batches

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Batches:
        """Yield the batches that `epoch` delivers.

        Must be a generator function: a live generator references `self`, so the loader cannot be collected and closed
        mid-epoch.
        """

    def close(self) -> None:
        """End live iterators, and release the resources of the loader."""
        _close_all(self._live_iterators)

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close_all(live_iterators: weakref.WeakSet[Batches]) -> None:
    for batches in list(live_iterators):
        with suppress(ValueError):  # A thread of `prefetch` is blocked in the generator.
            batches.close()


LOADERS = ConfigGroup[object, [SampleSource, EpochSampler, torch.device], Loader]("data/loader", __package__)
"""Subclasses of `Loader`, and functions that build one."""
register = LOADERS.register
