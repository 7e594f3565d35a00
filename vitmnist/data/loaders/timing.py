"""Timing a loader over a few batches, alone or with a training step, as `auto` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any

import torch

from vitmnist.data.collate import collate_samples, map_tensors
from vitmnist.data.loaders.base import Batches, Data, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.device import accelerator_of
from vitmnist.runtime.timer import EpochTimer, synchronize

WARM_UP = 2  # batches that are not timed: workers start, memory is touched for the first time
LEAST = 3  # batches that are timed in any case
LEAST_WAITING = 8  # and where data are waited for: workers deliver in bursts
NOTICEABLE_WAIT = 0.05  # the share of the time from which on data count as waited for
BLOCKS = 5  # the timed batches are divided into so many, whose range is the noise

Trial = Callable[[Loader], tuple[float, float | None]]
"""Runs through the loader's epoch 0; returns the seconds that it took, and how many of them it waited for data.

The latter is None where nothing but loading was timed.
"""

Step = Callable[..., object]
"""A training step of the user's: `step(images, labels)`, or `step(batch)` where a batch is not a pair."""


@dataclass(frozen=True)
class Timing:
    """Seconds per batch: the mean, the range of the means of blocks, and the mean wait for data if it is known."""

    mean: float
    low: float
    high: float
    waiting: float | None


def measure(loader: Loader, batches: int, seconds: float, trial: Trial) -> Timing:
    """Time the full batches of a loader, from epoch 0 on.

    Batches that are made ahead of time arrive faster than they are made. So as many as may wait at the start are left
    out, and where data are waited for at least as many are timed.

    Args:
        batches: timed at most, unless more are waited for.
        seconds: about how long it may take; `LEAST` batches are timed in any case.
    """
    if not len(loader):
        return Timing(0.0, 0.0, 0.0, None)
    spans: list[tuple[int, float, float | None]] = []
    with closing(_full_batches(loader)) as under_way:

        def run(some: int) -> None:
            spans.append((some, *trial(Portion(loader.sampler, under_way, some))))

        warm_up = max(WARM_UP, loader.buffered)
        run(warm_up)
        _, warming_s, _ = spans.pop()
        affordable = int(seconds * warm_up / warming_s) if warming_s else batches
        timed = min(max(affordable, LEAST), batches)
        for block in _blocks(timed):
            run(block)
        taken = sum(taken for _, taken, _ in spans)
        waited = sum(taken if waited is None else waited for _, taken, waited in spans)
        more = max(LEAST_WAITING, loader.buffered) - timed
        if more > 0 and waited > NOTICEABLE_WAIT * taken:
            run(more)
    total = sum(some for some, _, _ in spans)
    means = [taken / some for some, taken, _ in spans]
    waits = [waited for _, _, waited in spans if waited is not None]
    mean = sum(taken for _, taken, _ in spans) / total
    return Timing(mean, min(means), max(means), sum(waits) / total if waits else None)


def _full_batches(loader: Loader) -> Batches:
    """The batches of all epochs without the short last ones, which would tell too little."""
    global_sampler = loader.sampler.global_sampler
    full = global_sampler.size // global_sampler.batch_size or 1
    for number in count():
        for place, batch in enumerate(loader.epoch(number)):
            if place < full:
                yield batch


def _blocks(batches: int) -> list[int]:
    """`batches` divided into at most `BLOCKS` parts of nearly the same size."""
    parts = min(BLOCKS, batches)
    return [batches * (part + 1) // parts - batches * part // parts for part in range(parts)]


def time_loading(device: torch.device) -> Trial:
    """A trial without a model: batches are taken and dropped."""

    def trial(loader: Loader) -> tuple[float, None]:
        started = time.perf_counter()
        for _ in loader.epoch(0):
            pass
        synchronize(device)
        return time.perf_counter() - started, None

    return trial


def time_step(step: Step, device: torch.device) -> Trial:
    """A trial with a training step, which is called for real."""

    def trial(loader: Loader) -> tuple[float, float]:
        timer = EpochTimer(device)
        started = time.perf_counter()
        for batch in timer.waiting(loader.epoch(0)):
            step(*batch) if isinstance(batch, (tuple, list)) else step(batch)
        timer.stop()
        return time.perf_counter() - started, timer.seconds("waiting")

    return trial


class Portion(Loader):
    """The next few batches of an epoch that is under way."""

    def __init__(self, sampler: EpochSampler, under_way: Batches, count: int) -> None:
        super().__init__(sampler)
        self._under_way, self._count = under_way, count

    def __len__(self) -> int:
        return self._count

    def batches(self, number: int, start: int) -> Batches:
        yield from islice(self._under_way, self._count)


class Resident(Loader):
    """One batch that is already on the device, over and over: what the model takes when it never waits."""

    def __init__(self, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        size = min(sampler.batch_size, sampler.size)
        batch: Any
        if isinstance(data, TensorSet):
            batch = data.images[:size].to(device), data.labels[:size].to(device)
        else:
            samples = read_samples(data, range(size), sampler.seed, epoch=0)
            batch = map_tensors(accelerator_of(device).upload, collate_samples(samples))
        self._batch = batch

    def batches(self, number: int, start: int) -> Batches:
        yield from repeat(self._batch, len(self))
