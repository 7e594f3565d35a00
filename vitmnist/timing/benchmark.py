"""Times several ways of loading batches, interleaved, optionally with a training step.

A `LoaderCandidate` says what is timed, and a `Measurement` has its times. `timing.table` computes and prints the rows.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import ceil
from statistics import fmean
from traceback import clear_frames
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from vitmnist.errors import DataError, classify_error
from vitmnist.runtime.timer import EpochTimer
from vitmnist.timing.table import LoaderTiming, TimedWindow

NUM_WINDOWS = 5
"""The number of timed windows of a candidate. Their range is the noise."""
WARM_UP_BATCHES = 2
"""The number of batches in the first window, which is discarded: it includes compilation and page faults."""
MIN_GPU_WINDOW_S = 0.05
"""The least duration of a window on a GPU (s). A shorter one mostly shows how the queue of the GPU fills."""
GPU_WARM_UP_S = 0.5
"""The time for which a GPU computes before it is timed (s), because an idle GPU lowers its clocks."""
CPU = torch.device("cpu")
Item = TypeVar("Item")
StepFunction = Callable[[Any], object]
"""A training step: `step(batch)`."""


@dataclass(frozen=True)
class LoaderCandidate:
    """A way to load batches.

    Args:
        loader: a `DataLoader`, a loader of this project, or any iterable of batches.
        step: trains on a batch. None times loading alone.
        epoch: returns the batches of an epoch; by default `loader.epoch`, or the loader itself if it is iterable.
        setup_s: the time (s) to build the loader; None if there is nothing to build.
        change: line of code that puts this candidate into a script.
    """

    loader: object = None
    device: torch.device = CPU
    step: StepFunction | None = None
    epoch: Callable[[int], Iterable[object]] | None = None
    setup_s: float | None = None
    change: str | None = None

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if the loader has no length."""
        if isinstance(self.loader, Sized):
            with suppress(TypeError):  # A DataLoader has `__len__` even if its sampler has none.
                return len(self.loader)
        return None

    def batches(self, epoch: int) -> Iterable[object]:
        """Return the batches of an epoch. Epochs count from 0."""
        if self.epoch or not isinstance(self.loader, Iterable):
            return (self.epoch or self.loader.epoch)(epoch)  # type: ignore[attr-defined]
        return self.loader

    def time_batches(self, epoch: int, size: int) -> TimedWindow:
        """Time `size` batches of an epoch, skipping those that may have been prefetched before the first step ended."""
        workers = getattr(self.loader, "num_workers", 0)
        ahead = getattr(self.loader, "batches_ahead", 0)
        if isinstance(self.loader, DataLoader):
            ahead = workers * (self.loader.prefetch_factor or 0)
        if workers:  # Workers take turns, so each must load the same number of batches.
            size = ceil(size / workers) * workers
        if (length := self.length) is not None:
            ahead = max(0, min(ahead, length - 1 - size))
            size = min(size, length - 1 - ahead)
        timer = EpochTimer(self.device)
        timer.start()
        for batch in timer.waiting(islice(self.batches(epoch), 1 + ahead + size)):
            if self.step:
                self.step(batch)
        timer.stop()
        spans = pairwise(timer.spans())
        batches = [(waiting_s, step_s) for (phase, waiting_s), (_, step_s) in spans if phase == "waiting"]
        if not batches:
            raise DataError("it delivered no batch")
        later_batches = batches[1 + ahead :] or batches[1:] or batches  # The epoch can be shorter.
        waiting_s, step_s = map(fmean, zip(*later_batches, strict=True))
        host_lead = timer.host_lead_s / (waiting_s + step_s) if self.device.type == "cuda" else None
        return TimedWindow(len(batches), sum(batches[0]), batches[0][0], waiting_s + step_s, waiting_s, host_lead)


@dataclass
class Measurement:
    """The times of a candidate."""

    name: str
    candidate: LoaderCandidate
    is_required: bool = False  # Propagate errors instead of recording them as this candidate's failure.
    error: str | None = None  # Why the candidate could not be built or timed
    warm_up: TimedWindow | None = None  # The first window, which is discarded
    windows: list[TimedWindow] = field(default_factory=list)

    def time_window(self, size: int = WARM_UP_BATCHES) -> None:
        """Time `size` batches of a new epoch, unless an earlier window failed."""
        if self.error:
            return
        try:
            window = self.candidate.time_batches(len(self.windows) + 1 if self.warm_up else 0, size)
        except Exception as error:
            if self.is_required:
                raise
            # The frames of the traceback keep the workers of a DataLoader alive.
            clear_frames(error.__traceback__)
            self.error = classify_error(error).message
            return
        if self.warm_up:
            self.windows.append(window)
        else:
            self.warm_up = window


class Benchmark:
    """Builds candidates and times them in turns."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []

    def add(self, name: str, build: Callable[[], LoaderCandidate], *, is_required: bool = False) -> Measurement:
        """Build a candidate and time its first window. An error is recorded unless the candidate is required."""
        measurement = Measurement(name, LoaderCandidate(), is_required)
        try:
            measurement.candidate = build()
        except Exception as error:  # For example, a sample that the user's loop never reads can be broken.
            if is_required:
                raise
            measurement.error = classify_error(error).message
        measurement.time_window()
        self.measurements.append(measurement)
        return measurement

    def run(self, batches: int, seconds: float) -> None:
        """Time up to `NUM_WINDOWS` further windows of each candidate, in turns.

        Args:
            batches: number of batches of each candidate; fewer if all candidates would take more than `seconds`.
        """
        live = [measurement for measurement in self.measurements if not measurement.error]
        self._warm_up_gpu(live, ceil(batches / NUM_WINDOWS))
        deadline = time.perf_counter() + seconds
        first_batches_s = sum(measurement.warm_up.first_s for measurement in live if measurement.warm_up)
        batches_s = sum(measurement.warm_up.later_batch_s for measurement in live if measurement.warm_up)
        affordable = int((seconds / NUM_WINDOWS - first_batches_s) / batches_s) if batches_s else batches
        size = max(1, min(affordable, ceil(batches / NUM_WINDOWS)))
        rounds = tqdm(rotate(live, NUM_WINDOWS), "timing", NUM_WINDOWS, leave=False, disable=None)
        for index, measurements in enumerate(rounds):
            if index and time.perf_counter() > deadline:  # The first batch of each window can take long.
                break
            for measurement in measurements:
                window, window_size = measurement.warm_up, size
                if window and measurement.candidate.device.type == "cuda":
                    window_size = max(size, ceil(MIN_GPU_WINDOW_S / window.later_batch_s))
                measurement.time_window(window_size)

    @staticmethod
    def _warm_up_gpu(measurements: Sequence[Measurement], size: int) -> None:
        """Raise the clocks of a GPU, and time the first windows again, which no longer include compilation."""
        on_gpu = [measurement for measurement in measurements if measurement.candidate.device.type == "cuda"]
        started = time.perf_counter()
        while on_gpu and time.perf_counter() - started < GPU_WARM_UP_S:
            for measurement in on_gpu:
                measurement.warm_up = None
                measurement.time_window(size)


def rotate(candidates: Sequence[Item], rounds: int) -> Iterator[list[Item]]:
    """Yield the candidates for each round, rotated so that no candidate is always the first."""
    for index in range(rounds):
        first = index % max(len(candidates), 1)
        yield [*candidates[first:], *candidates[:first]]


def make_timings(measurements: Sequence[Measurement], length: float | None) -> list[LoaderTiming]:
    """Return a row of the table for each measurement.

    Args:
        length: number of batches in an epoch. None if it is unknown: the rows then show this instead of figures.
    """
    timings: list[LoaderTiming] = []
    for measurement in measurements:
        candidate, error = measurement.candidate, measurement.error
        if length is None:
            error = error or "the length of an epoch is unknown"
        timing = LoaderTiming(measurement.name, setup_s=candidate.setup_s, change=candidate.change, error=error)
        if length is not None and not error:
            # Without a set-up, the first loader is in use, so the set-up of another one must pay off.
            baseline = timings[0] if timings and timings[0].setup_s is None else None
            timing = timing.with_estimates(measurement.windows, length, candidate.step is not None, baseline)
        timings.append(timing)
    return timings
