"""Times a loader over a few batches, alone or with a training step; used by `auto`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
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
from vitmnist.runtime.timer import EpochTimer

WARM_UP = 2  # batches that are not timed: workers start, memory is touched for the first time
LEAST = 3  # batches that are always timed
LEAST_WAITING = 8  # and if the step waits for data: workers deliver in bursts
NOTICEABLE_WAIT = 0.05  # the share of the time from which the step counts as waiting for data
BLOCKS = 5  # the timed batches are divided into so many blocks, whose range is the noise

Step = Callable[..., object]
"""A user's training step: `step(batch)`, or `step(images, labels)` if it has several required arguments."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Trial:
    """What is timed: a loader's batches, and the step that trains on each.

    Args:
        epoch: the batches of an epoch, as the step takes them: with a CUDA graph, these may be indices.
        run: goes through some of them; returns the seconds that it took, and how many of them it waited for data.
    """

    epoch: Callable[[int], Iterable[Any]]
    run: Callable[[Iterable[Any]], tuple[float, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds per batch: the mean, the lowest and highest mean of a block, and the mean wait for data."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    waiting: float = 0.0


class ResidentBatch(Loader):
    """Repeats one batch that is already on the device, to time a model that never waits for data."""

    def __init__(self, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        size = min(sampler.batch_size, sampler.size)
        self._batch: Any
        if isinstance(data, TensorSet):
            self._batch = data.images[:size].to(device), data.labels[:size].to(device)
        else:
            samples = read_samples(data, range(size), sampler.seed, epoch=0)
            self._batch = map_tensors(accelerator_of(device).to_device, collate_samples(samples))

    def batches(self, number: int, start: int) -> Batches:
        yield from repeat(self._batch, len(self) - start)


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
    with closing(_full_batches(loader, trial)) as iterator:

        def run(size: int) -> tuple[int, float, float]:
            return size, *trial.run(islice(iterator, size))

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


def _full_batches(loader: Loader, trial: Trial) -> Generator[Any, None, None]:
    """The batches of all epochs, without the short last ones, whose times would mislead."""
    global_sampler = loader.sampler.global_sampler
    full = global_sampler.size // global_sampler.batch_size or 1
    for number in count():
        for place, batch in enumerate(trial.epoch(number)):  # to its end, so that workers stay for the next epoch
            if place < full:
                yield batch


def _split(total: int, parts: int) -> list[int]:
    """`total` divided into at most `parts` numbers of nearly the same size."""
    parts = min(parts, total)
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


def new_trial(loader: Loader, device: torch.device, step: Step | None = None) -> Trial:
    """A trial that calls a training step with each batch of a loader; without one, batches are dropped."""
    call = calling(step) if step else None
    return Trial(loader.epoch, lambda batches: time_batches(batches, device, call))


def calling(step: Step) -> Callable[[Any], object]:
    """A function of one batch: `step(batch)`, or `step(*batch)` if the step has several required arguments."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return step
    required = [one for one in parameters if one.kind in POSITIONAL and one.default is one.empty]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(required) < 2 and not takes_any:
        return step
    return lambda batch: step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


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
