"""What is measured of one `DataLoader` of a user's script."""

from __future__ import annotations

import multiprocessing
import sys
import sysconfig
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from vitmnist.runtime.files import display_path

LIBRARIES = (
    *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parent.parent),
)


@dataclass(frozen=True)
class Limits:
    """How many steps of each loader are observed after how many that are not; `stop` ends the script then."""

    steps: int
    warm_up: int
    stop: bool


class FetchTimes:
    """How many batches the processes of one `DataLoader` have made, and in how many seconds.

    The memory is shared with forked workers. Each has its own slot, so there is no lock that a killed one could hold.
    """

    def __init__(self, num_workers: int) -> None:
        self._slots = RawArray("d", 2 * max(num_workers, 1))

    def total(self) -> tuple[float, float]:
        """Batches and seconds, of all workers."""
        return sum(self._slots[::2]), sum(self._slots[1::2])

    def timed(self, fetch: Callable[[Any], Any], worker: int) -> Callable[[Any], Any]:
        """`fetch`, whose duration is added to the slot of `worker`."""

        def timed_fetch(indices: Any) -> Any:
            started = perf_counter()
            batch = fetch(indices)
            self._slots[2 * worker + 1] += perf_counter() - started
            self._slots[2 * worker] += 1
            return batch

        return timed_fetch


@dataclass
class Observation:
    """One `DataLoader`, or several alike in turn; times are sums in seconds over the observed steps.

    A step is observed once its iterator has been asked for another batch.
    """

    loader: weakref.ref[Any]
    about: dict[str, Any]  # the settings of the loader, and where it is iterated
    limits: Limits
    fetch_times: FetchTimes
    num_loaders: int = 1
    first_batches_s: list[float] = field(default_factory=list)  # one per epoch, observed or not
    seen: int = 0  # batches, observed or not
    steps: int = 0
    waiting_s: float = 0.0
    first_waiting_s: float = 0.0  # the part of `waiting_s` for the first batches of epochs
    step_s: float = 0.0
    overhead_s: float = 0.0  # of this measurement, over all batches
    _made_before: tuple[float, float] = (0.0, 0.0)
    _made_after: tuple[float, float] | None = None

    @property
    def is_complete(self) -> bool:
        return self.steps >= self.limits.steps

    def add_batch(self, waiting_s: float, is_first: bool) -> None:
        """Count a batch that has arrived; `is_first` of its epoch, whose wait includes the start of the workers."""
        self.seen += 1
        if is_first:
            self.first_batches_s.append(waiting_s)
        if self.seen == self.limits.warm_up:
            self._made_before = self.fetch_times.total()

    def add_step(self, waiting_s: float, step_s: float, is_first: bool) -> bool:
        """Add the times of the step over the latest batch, unless it was a warm-up or too late.

        Returns:
            Whether the observation became complete.
        """
        if self.seen <= self.limits.warm_up or self.is_complete:
            return False
        self.steps += 1
        self.waiting_s += waiting_s
        self.first_waiting_s += waiting_s if is_first else 0.0
        self.step_s += step_s
        if self.is_complete:
            self._made_after = self.fetch_times.total()
        return self.is_complete

    def made(self) -> tuple[float, float]:
        """Batches made while the steps were observed, and the seconds that it took."""
        batches, seconds = self._made_after or self.fetch_times.total()
        return batches - self._made_before[0], seconds - self._made_before[1]


def new_observation(loader: Any, limits: Limits) -> Observation:
    """The observation of a `DataLoader` over which iteration begins."""
    context = loader.multiprocessing_context or multiprocessing
    batch_size = loader.batch_size
    samples = None
    with suppress(Exception):  # the script may never ask for the length, so any error is none of the script's
        samples = len(loader.dataset)
    about = {
        "dataset": type(loader.dataset).__name__,
        "samples": samples,
        "sampler": type(loader.sampler).__name__,
        "drop_last": loader.drop_last,
        "is_map_style": loader._dataset_kind == 0,
        "batch_size": getattr(loader.batch_sampler, "batch_size", None) if batch_size is None else batch_size,
        "num_workers": loader.num_workers,
        "start_method": context.get_start_method() if loader.num_workers else None,
        "persistent_workers": loader.persistent_workers,
        "where": _calling_line(),
    }
    return Observation(weakref.ref(loader), about, limits, FetchTimes(loader.num_workers))


def _calling_line() -> str:
    """File and line of the user's code that iterates, not of a library such as tqdm that does so for it."""
    callers = []
    frame: FrameType | None = sys._getframe()
    while frame:
        if not frame.f_code.co_filename.startswith((str(Path(__file__).parent), "<frozen")):
            callers.append(frame)
        frame = frame.f_back
    user = next((frame for frame in callers if not frame.f_code.co_filename.startswith(LIBRARIES)), callers[0])
    return f"{display_path(user.f_code.co_filename)}:{user.f_lineno}"
