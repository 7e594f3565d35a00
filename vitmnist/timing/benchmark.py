"""Times several ways of loading batches, interleaved, optionally with a training step."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, islice, pairwise
from math import ceil
from statistics import fmean, median
from traceback import clear_frames
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from vitmnist.errors import classify_error
from vitmnist.runtime.timer import EpochTimer
from vitmnist.timing.table import LoaderTiming, Spread

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
class TimedWindow:
    """The times of the first batches of an epoch, in seconds.

    Args:
        first_s: time until the end of the first step, with `first_waiting_s` of waiting.
        later_batch_s: mean time of each later batch with its step, with `later_waiting_s` of waiting.
        host_lead: number of steps that were queued on a GPU at the end; None on the CPU.
    """

    first_s: float
    first_waiting_s: float
    later_batch_s: float
    later_waiting_s: float
    host_lead: float | None = None

    def estimate_epoch_s(self, batches: float) -> float:
        """Return the seconds of an epoch of `batches` batches."""
        return self.first_s + self.later_batch_s * (batches - 1)

    def estimate_waiting_pct(self, batches: float) -> float:
        """Return the percentage of an epoch of `batches` batches that is spent waiting."""
        waiting_s = self.first_waiting_s + self.later_waiting_s * (batches - 1)
        return 100 * waiting_s / (self.estimate_epoch_s(batches) or 1.0)


@dataclass(eq=False)
class LoaderCandidate:
    """A way to load batches, with its times.

    Args:
        loader: a `DataLoader`, a loader of this project, or any iterable of batches.
        step: trains on a batch. None times loading alone.
        epoch: returns the batches of an epoch; by default `loader.epoch`, or the loader itself if it is iterable.
        change: line of code that puts this candidate into a script.
        is_required: propagate errors instead of recording them as this candidate's failure.
        warm_up: the first window, which is discarded.
    """

    loader: object = None
    device: torch.device = CPU
    step: StepFunction | None = None
    epoch: Callable[[int], Iterable[object]] | None = None
    set_up_s: float | None = None
    change: str | None = None
    is_required: bool = False
    error: str | None = None
    name: str = ""
    warm_up: TimedWindow | None = None
    windows: list[TimedWindow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._epochs = count()
        self.num_batches = 0
        """The number of batches loaded so far."""
        self.length: int | None = None
        """The number of batches in an epoch; None if the loader has no length."""
        if isinstance(self.loader, Sized):
            with suppress(TypeError):  # A DataLoader has `__len__` even if its sampler has none.
                self.length = len(self.loader)

    def batches(self, epoch: int) -> Iterable[object]:
        """Return the batches of an epoch. Epochs count from 0."""
        if self.epoch or not isinstance(self.loader, Iterable):
            return (self.epoch or self.loader.epoch)(epoch)  # type: ignore[attr-defined]
        return self.loader

    def time_window(self, size: int = WARM_UP_BATCHES) -> None:
        """Time `size` batches of a new epoch, unless an earlier window failed."""
        if self.error:
            return
        try:
            window = self._measure(size)
        except Exception as error:
            if self.is_required:
                raise
            # The frames of the traceback keep the workers of a DataLoader alive.
            clear_frames(error.__traceback__)
            self.error = classify_error(error).message
            return
        if window and self.warm_up:
            self.windows.append(window)
        self.warm_up = self.warm_up or window

    def _measure(self, size: int) -> TimedWindow | None:
        """Time `size` batches, skipping those that may have been prefetched before the first step ended."""
        workers = getattr(self.loader, "num_workers", 0)
        ahead = getattr(self.loader, "batches_ahead", 0)
        if isinstance(self.loader, DataLoader):
            ahead = workers * (self.loader.prefetch_factor or 0)
        if workers:  # Workers take turns, so each must load the same number of batches.
            size = ceil(size / workers) * workers
        if self.length is not None:
            ahead = max(0, min(ahead, self.length - 1 - size))
            size = min(size, self.length - 1 - ahead)
        timer = EpochTimer(self.device)
        timer.start()
        for batch in timer.waiting(islice(self.batches(next(self._epochs)), 1 + ahead + size)):
            self.num_batches += 1
            if self.step:
                self.step(batch)
        timer.stop()
        spans = pairwise(timer.spans())
        batches = [(waiting_s, step_s) for (phase, waiting_s), (_, step_s) in spans if phase == "waiting"]
        if not batches:
            return None
        later_batches = batches[1 + ahead :] or batches[1:] or batches  # The epoch can be shorter.
        waiting_s, step_s = map(fmean, zip(*later_batches, strict=True))
        host_lead = timer.host_lead_s / (waiting_s + step_s) if self.device.type == "cuda" else None
        return TimedWindow(sum(batches[0]), batches[0][0], waiting_s + step_s, waiting_s, host_lead)


class Benchmark(ExitStack):
    """Builds candidates and times them in turns. Their loaders stay open until the exit of the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates: list[LoaderCandidate] = []

    def add(self, name: str, build: Callable[[], LoaderCandidate]) -> LoaderCandidate:
        """Build a candidate and time its first window. An error is recorded as the candidate's failure."""
        try:
            candidate = build()
        except Exception as error:  # For example, a sample that the user's loop never reads can be broken.
            candidate = LoaderCandidate(error=classify_error(error).message)
        candidate.name = name
        candidate.time_window()
        if close := getattr(candidate.loader, "close", None):
            self.callback(close)
        self.candidates.append(candidate)
        return candidate

    def run(self, batches: int, seconds: float) -> None:
        """Time up to `NUM_WINDOWS` further windows of each candidate, in turns.

        Args:
            batches: number of batches of each candidate; fewer if all candidates would take more than `seconds`.
        """
        live = [candidate for candidate in self.candidates if not candidate.error]
        self._warm_up_gpu(live, ceil(batches / NUM_WINDOWS))
        deadline = time.perf_counter() + seconds
        first_batches_s = sum(candidate.warm_up.first_s for candidate in live if candidate.warm_up)
        batches_s = sum(candidate.warm_up.later_batch_s for candidate in live if candidate.warm_up)
        affordable = int((seconds / NUM_WINDOWS - first_batches_s) / batches_s) if batches_s else batches
        size = max(1, min(affordable, ceil(batches / NUM_WINDOWS)))
        rounds = tqdm(rotate(live, NUM_WINDOWS), "timing", NUM_WINDOWS, leave=False, disable=None)
        for index, candidates in enumerate(rounds):
            if index and time.perf_counter() > deadline:  # The first batch of each window can take long.
                break
            for candidate in candidates:
                window, window_size = candidate.warm_up, size
                if window and candidate.device.type == "cuda":
                    window_size = max(size, ceil(MIN_GPU_WINDOW_S / window.later_batch_s))
                candidate.time_window(window_size)

    @staticmethod
    def _warm_up_gpu(candidates: Sequence[LoaderCandidate], size: int) -> None:
        """Raise the clocks of a GPU, and time the first windows again, which no longer include compilation."""
        on_gpu = [candidate for candidate in candidates if candidate.device.type == "cuda"]
        started = time.perf_counter()
        while on_gpu and time.perf_counter() - started < GPU_WARM_UP_S:
            for candidate in on_gpu:
                candidate.warm_up = None
                candidate.time_window(size)


def rotate(candidates: Sequence[Item], rounds: int) -> Iterator[list[Item]]:
    """Yield the candidates for each round, rotated so that no candidate is always the first."""
    for index in range(rounds):
        first = index % max(len(candidates), 1)
        yield [*candidates[first:], *candidates[:first]]


def make_timings(
    candidates: Sequence[LoaderCandidate], length: float | None, has_baseline: bool = True
) -> list[LoaderTiming]:
    """Return a row of the table for each candidate.

    Args:
        length: number of batches in an epoch. None if it is unknown: the rows then show this instead of figures.
        has_baseline: the first candidate is the loader in use. `break_even_epoch` compares the others with it.
    """
    timings: list[LoaderTiming] = []
    for candidate in candidates:
        if candidate.error or not candidate.windows or length is None:
            reason = "the length of an epoch is unknown" if candidate.windows else "it delivered no batch"
            timings.append(LoaderTiming(candidate.name, error=candidate.error or reason))
            continue
        batch_s = Spread.of(window.later_batch_s for window in candidate.windows)
        epoch_s = Spread.of(window.estimate_epoch_s(length) for window in candidate.windows)
        waiting_pct = (
            median(window.estimate_waiting_pct(length) for window in candidate.windows) if candidate.step else None
        )
        baseline_s = timings[0].epoch_s if timings and has_baseline else None
        saved_s = baseline_s.median - epoch_s.median if baseline_s else 0.0
        break_even_epoch = max(1, ceil((candidate.set_up_s or 0.0) / saved_s)) if saved_s > 0 else None
        set_up_s, change = candidate.set_up_s, candidate.change
        timings.append(LoaderTiming(candidate.name, batch_s, epoch_s, waiting_pct, set_up_s, break_even_epoch, change))
    return timings
