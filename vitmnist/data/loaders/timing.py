"""Times a loader over a few batches, alone or with a training step; used by `auto`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any

import torch

from vitmnist.data.collate import collate_samples, map_tensors
from vitmnist.data.loaders.base import Batch, Batches, Data, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.device import accelerator_of
from vitmnist.runtime.timer import EpochTimer

WARM_UP = 2  # batches that are not timed: workers start, memory is touched for the first time
LEAST = 3  # batches that are always timed
LEAST_WAITING = 8  # and if the step waits for data: workers deliver in bursts
NOTICEABLE_WAIT = 0.05  # the share of the time from which the step counts as waiting for data
BLOCKS = 5  # the timed batches are divided into so many blocks, whose range is the noise

Trial = Callable[[Loader], tuple[float, float]]
"""Runs through epoch 0 of a loader; returns the seconds that it took, and how many of them it waited for data."""

Step = Callable[..., object]
"""A user's training step: `step(images, labels)`, or `step(batch)` if a batch is not a pair."""


@dataclass(frozen=True)
class Timing:
    """Seconds per batch: the mean, the lowest and highest mean of a block, and the mean wait for data."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    waiting: float = 0.0


class IteratorLoader(Loader):
    """Delivers the next `size` batches of an iterator as an epoch."""

    def __init__(self, sampler: EpochSampler, iterator: Iterator[Batch], size: int) -> None:
        super().__init__(sampler)
        self._iterator, self._size = iterator, size

    def __len__(self) -> int:
        return self._size

    def batches(self, number: int, start: int) -> Batches:
        yield from islice(self._iterator, self._size)


def resident_loader(data: Data, sampler: EpochSampler, device: torch.device) -> Loader:
    """Repeats one batch that is already on the device, to time a model that never waits for data."""
    size = min(sampler.batch_size, sampler.size)
    batch: Any
    if isinstance(data, TensorSet):
        batch = data.images[:size].to(device), data.labels[:size].to(device)
    else:
        samples = read_samples(data, range(size), sampler.seed, epoch=0)
        batch = map_tensors(accelerator_of(device).to_device, collate_samples(samples))
    return IteratorLoader(sampler, repeat(batch), len(sampler))


def measure(loader: Loader, batches: int, seconds: float, trial: Trial) -> Timing:
    """Time the full batches of a loader, from epoch 0 on.

    Batches that were ready at the start arrive faster than they are made. So as many as may be buffered are left out,
    and if the step waits for data at least as many are timed.

    Args:
        batches: the most batches to time, unless the step waits for data.
        seconds: about how long it may take; `LEAST` batches are always timed.
    """
    if not len(loader):
        return Timing()
    with closing(_full_batches(loader)) as iterator:

        def run(size: int) -> tuple[int, float, float]:
            return size, *trial(IteratorLoader(loader.sampler, iterator, size))

        warm_up, warm_up_s, _ = run(max(WARM_UP, loader.buffered))
        affordable = int(seconds * warm_up / warm_up_s) if warm_up_s else batches
        timed = min(max(affordable, LEAST), batches)
        blocks = [run(size) for size in _split(timed, BLOCKS)]
        missing = max(LEAST_WAITING, loader.buffered) - timed
        if missing > 0 and sum(wait for *_, wait in blocks) > NOTICEABLE_WAIT * sum(
            block_s for _, block_s, _ in blocks
        ):
            blocks.append(run(missing))
    sizes, seconds_of_blocks, waits = zip(*blocks, strict=True)
    means = [block_s / size for size, block_s in zip(sizes, seconds_of_blocks, strict=True)]
    return Timing(sum(seconds_of_blocks) / sum(sizes), min(means), max(means), sum(waits) / sum(sizes))


def _full_batches(loader: Loader) -> Batches:
    """The batches of all epochs, without the short last ones, whose times would mislead."""
    global_sampler = loader.sampler.global_sampler
    full = global_sampler.size // global_sampler.batch_size or 1
    for number in count():
        for place, batch in enumerate(loader.epoch(number)):  # to its end, so that workers stay for the next epoch
            if place < full:
                yield batch


def _split(total: int, parts: int) -> list[int]:
    """`total` divided into at most `parts` numbers of nearly the same size."""
    parts = min(parts, total)
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


def time_batches(device: torch.device, step: Step | None = None) -> Trial:
    """A trial that calls a training step with each batch; without one, batches are dropped."""

    def trial(loader: Loader) -> tuple[float, float]:
        timer = EpochTimer(device)
        started = time.perf_counter()
        for batch in timer.waiting(loader.epoch(0)):
            if step:
                step(*batch) if isinstance(batch, (tuple, list)) else step(batch)
        timer.stop()
        return time.perf_counter() - started, timer.seconds()["waiting"]

    return trial
