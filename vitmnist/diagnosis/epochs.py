"""Times the epochs that a loader would have with other settings, by short ones in which the step is imitated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader

from vitmnist.replacement.original import read_batch

READ = 4  # samples, by which the time of a batch is estimated
TRY_S = 0.25  # for the batches of a short epoch
ROUNDS = 3  # of them, in each of which every worker makes a batch
MOST_ROUNDS = 12
COMPUTES = 0.5  # cores that a step uses, from which it computes rather than waits
LATE_S = 2.0  # without a batch, after which the workers are said to fail


@dataclass(frozen=True)
class Epoch:
    """An epoch of a loader, of which `start_s` is for the start and the end of its workers."""

    start_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start_s + self.rest_s


@dataclass(frozen=True)
class Loop:
    """The loop of a script.

    Args:
        batches: in an epoch.
        work_s: of a step.
        cores: that the step uses.
    """

    batches: float
    batch_size: int
    work_s: float
    cores: float

    def epoch(self, dataset: Any, collate: Any, workers: int) -> Epoch | None:
        """The epoch with this number of workers, from a few batches; None if they cannot be read so."""
        with suppress(Exception):  # of any kind, and workers may lack what the samples need
            few = range(min(READ, self.batch_size, len(dataset)))
            began = perf_counter()
            read_batch(dataset, collate, few)
            return self._timed(dataset, collate, workers, (perf_counter() - began) / len(few))
        return None

    def _timed(self, dataset: Any, collate: Any, workers: int, sample_s: float) -> Epoch:
        batch_s = max(self.batch_size * sample_s, workers * self.work_s, 1e-6)
        # Slow batches are replaced by smaller ones.
        size = max(1, int(self.batch_size * min(1.0, TRY_S / ROUNDS / batch_s)))
        rounds = max(ROUNDS, min(MOST_ROUNDS, int(TRY_S / batch_s)))
        count = 1 + rounds * max(workers, 1)
        order = [number % len(dataset) for number in range(count * size)]
        settings: dict[str, Any] = {"multiprocessing_context": "fork", "timeout": LATE_S + 10 * batch_s}
        part, arrived = size / self.batch_size, []
        work = self._imitated() if workers else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of more workers than cores
            batches: Any = DataLoader(
                dataset, size, sampler=order, collate_fn=collate, num_workers=workers, **settings if workers else {}
            )
            batches.is_internal = True  # not of the script
            began = perf_counter()
            for _ in batches:
                arrived.append(perf_counter())
                if work:
                    work(part * self.work_s)
            ended = perf_counter()
        each_s = (arrived[-1] - arrived[0]) / (count - 1)
        if not work:
            return Epoch(0.0, self.batches * (each_s / part + self.work_s))
        first_s = sample_s * (self.batch_size - size)  # until a whole batch is there
        return Epoch(max(0.0, ended - began - count * each_s) + first_s, self.batches * each_s / part)

    def _imitated(self) -> Callable[[float], None]:
        """A function that imitates a step of given seconds: by waiting, or computing, which workers may slow down."""
        if self.cores < COMPUTES:
            return sleep
        square = torch.ones(*2 * [64 if self.cores < 1 + COMPUTES else 512])  # small ones are multiplied on one core
        began = perf_counter()
        for _ in range(10):
            square @ square
        product_s = (perf_counter() - began) / 10

        def compute(seconds: float) -> None:
            for _ in range(round(seconds / product_s)):
                square @ square

        return compute
