"""What is measured of one `DataLoader` of a user's script."""

from __future__ import annotations

import multiprocessing
import sys
import sysconfig
import weakref
from collections.abc import Callable
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
    """One `DataLoader`; times are sums in seconds over the observed steps, without the first step of each epoch."""

    loader: weakref.ref[Any]
    limits: Limits
    dataset: str
    is_map_style: bool
    batch_size: int | None
    num_workers: int
    start_method: str | None  # of its workers
    persistent_workers: bool
    where: str  # file and line that iterate over it
    fetch_times: FetchTimes
    first_batches_s: list[float] = field(default_factory=list)  # one per epoch, warm-up included
    first_epoch_steps: int | None = None  # from the second epoch on
    seen: int = 0  # steps, warm-up and first steps included
    steps: int = 0
    waiting_s: float = 0.0
    step_s: float = 0.0
    requests: int = 0
    overhead_s: float = 0.0  # in this module, over all requests
    _made_before: tuple[float, float] = (0.0, 0.0)
    _made_after: tuple[float, float] | None = None

    @property
    def is_complete(self) -> bool:
        return self.steps >= self.limits.steps

    @property
    def settings(self) -> tuple[object, ...]:
        return self.dataset, self.batch_size, self.num_workers

    def add_first_step(self, waiting_s: float) -> None:
        """Count the first step of an epoch, whose wait is kept apart: it includes the start of the workers."""
        self.first_batches_s.append(waiting_s)
        if len(self.first_batches_s) == 2:
            self.first_epoch_steps = self.seen
        self._count_step()

    def add_step(self, waiting_s: float, step_s: float) -> None:
        """Count another step and, after the warm-up, its times."""
        self._count_step()
        if self.seen <= self.limits.warm_up or self.is_complete:
            return
        self.steps += 1
        self.waiting_s += waiting_s
        self.step_s += step_s
        if self.is_complete:
            self._made_after = self.fetch_times.total()

    def _count_step(self) -> None:
        self.seen += 1
        if self.seen == self.limits.warm_up:
            self._made_before = self.fetch_times.total()

    def made(self) -> tuple[float, float]:
        """Batches made while the steps were observed, and the seconds that it took."""
        batches, seconds = self._made_after or self.fetch_times.total()
        return batches - self._made_before[0], seconds - self._made_before[1]


def new_observation(loader: Any, limits: Limits) -> Observation:
    """The observation of a `DataLoader` over which iteration begins."""
    context = loader.multiprocessing_context or multiprocessing
    batch_size = loader.batch_size
    return Observation(
        loader=weakref.ref(loader),
        limits=limits,
        dataset=type(loader.dataset).__name__,
        is_map_style=loader._dataset_kind == 0,
        batch_size=getattr(loader.batch_sampler, "batch_size", None) if batch_size is None else batch_size,
        num_workers=loader.num_workers,
        start_method=context.get_start_method() if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        where=_calling_line(),
        fetch_times=FetchTimes(loader.num_workers),
    )


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
