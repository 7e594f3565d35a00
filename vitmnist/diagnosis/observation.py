"""What is measured of a user's script: the time of its main thread, and each of its `DataLoader`s."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from types import FrameType
from typing import Any

from vitmnist.runtime.cpu import CpuTime
from vitmnist.runtime.files import display_path

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent))
PACKAGES = {"site-packages", "dist-packages"}  # also those of another environment

HELD_S = 0.001  # work per step, below which the script seems to collect batches


@dataclass(frozen=True)
class Limits:
    """How many steps to observe after the warm-up; `stop` ends the script then.

    A step is a batch, or one batch of each loader if they are iterated in lockstep, as by `zip`.

    Args:
        steps: None observes up to the end of the script.
    """

    steps: int | None
    warm_up: int
    stop: bool


@dataclass
class Observation:
    """One `DataLoader`, or several alike in turn; the fields from `batches` on are measured after the warm-up."""

    loaders: weakref.WeakSet[Any]  # those that still exist
    about: dict[str, Any]  # the settings of the loader, and where it is iterated
    # Kept for the advice, because a loader that a function has built no longer exists when the script has ended.
    samples: tuple[Any, Any, type] | None  # dataset, collate function, class; None if the dataset gives batches
    num_loaders: int = 1
    in_other_thread: bool = False
    is_iterated: bool = False  # now
    epochs: int = 0
    batches_seen: int = 0
    batches: int = 0
    waiting_s: float = 0.0
    waiting_cpu_s: float = 0.0  # processor time of this process while it waited; 0 with workers
    restarts_s: float = 0.0  # the part of `waiting_s` for the first batches and the ends of epochs, and their workers

    def forget(self) -> None:
        """Drop what was measured of the warm-up."""
        self.batches, self.waiting_s, self.waiting_cpu_s, self.restarts_s = 0, 0.0, 0.0, 0.0

    def figures(self) -> dict[str, Any]:
        """As plain values."""
        return self.about | {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


class Timeline:
    """The main thread's time from the end of the warm-up to the end of the script: waiting for a loader, or work.

    Waiting is the time within `iter()` and `next()` of a `DataLoader`, and for the end of its workers. It is summed
    over the whole time: a loop may hold batches ahead (`list(loader)`, Accelerate), so the work after a request need
    not be the step over the batch that it returned.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.observations: list[Observation] = []
        self.steps = 0
        self.waiting_s = 0.0
        self.last_request = 0.0
        self.skipped = limits.warm_up
        """Steps of the warm-up."""
        self.began: CpuTime | None = None
        self.ended: CpuTime | None = None
        self.is_stopped = False
        self._is_warm = False
        self._in_step: set[int] = set()  # the loaders that have delivered a batch of the current step
        self._is_waiting = False
        self._epoch = (0.0, 0.0, 0)  # clock, waiting and steps when it began

    @property
    def is_open(self) -> bool:
        """Whether steps are observed now."""
        return self.began is not None and self.ended is None

    @property
    def is_complete(self) -> bool:
        """Whether as many steps have been observed as asked for."""
        return self._is_warm and self.limits.steps is not None and self.steps >= self.limits.steps

    @property
    def is_threaded(self) -> bool:
        """Whether a loader is iterated in another thread, so that the script's own waiting is unknown."""
        return any(observation.in_other_thread for observation in self.observations)

    def wait(
        self, observation: Observation, call: Callable[..., Any], *arguments: Any, is_restart: bool = False
    ) -> Any:
        """Call a function of a loader, and add its duration to the waiting.

        Args:
            is_restart: whether the call begins or ends an epoch.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._is_waiting:  # within a call of another loader, which is charged
            return call(*arguments)
        self._begin_or_end(is_start=is_restart, can_stop=is_main)
        if is_restart and call is not next:  # the epoch before may have been left early, within a step
            self._in_step.clear()
        self._is_waiting |= is_main
        # Read within the time that counts as waiting; not with workers: the loop would lose its core in the call.
        started, cpu_s = perf_counter(), 0.0 if observation.about["num_workers"] else process_time()
        try:
            return call(*arguments)
        except StopIteration:
            is_restart = True
            self._in_step.clear()
            raise
        finally:
            cpu_s = 0.0 if observation.about["num_workers"] else process_time() - cpu_s
            self.last_request = perf_counter()
            self._is_waiting &= not is_main
            if self.is_open:
                seconds = self.last_request - started
                self.waiting_s += seconds if is_main else 0.0
                observation.waiting_s += seconds
                observation.waiting_cpu_s += cpu_s
                observation.restarts_s += seconds if is_restart else 0.0

    def add_batch(self, observation: Observation) -> None:
        """Count a batch that has arrived, and the step if it is the first batch of one."""
        observation.batches_seen += 1
        observation.batches += self.is_open
        observation.in_other_thread |= threading.current_thread() is not threading.main_thread()
        if not self._in_step or id(observation) in self._in_step:
            self._in_step.clear()
            self.steps += self.is_open
        self._in_step.add(id(observation))

    def end(self, reading: CpuTime | None = None) -> None:
        """Observe no more, from now or from `reading` on."""
        if self.is_open:
            self.ended = reading or CpuTime.now()
            if not self._is_warm:
                self._forget()

    def _begin_or_end(self, *, is_start: bool, can_stop: bool) -> None:
        """Called before each request; `is_start` if it begins an epoch."""
        if self.began is None:
            self.began = CpuTime.now()
        if not self._is_warm and self.steps >= self.limits.warm_up:
            self._is_warm = True
            if self._holds_batches():
                self.skipped = 0  # the steps of the warm-up are still to come
            elif self.steps:
                self._forget()
                self.began = CpuTime.now()
        elif self.is_open and self.is_complete and (is_start or not self._holds_batches()):
            self.end()
            if self.limits.stop and can_stop:
                self.is_stopped = True
                sys.exit(0)
        if is_start:
            self._epoch = perf_counter(), self.waiting_s, self.steps

    def _holds_batches(self) -> bool:
        """Whether the script seems to collect the batches of this epoch, and to work on them later."""
        began_s, waited_s, steps = self._epoch
        waiting_s, steps = self.waiting_s - waited_s, self.steps - steps
        work_s = perf_counter() - began_s - waiting_s
        return steps > 0 and work_s < min(HELD_S * steps, waiting_s / 10)

    def _forget(self) -> None:
        """Drop what was measured of the warm-up."""
        self.steps, self.waiting_s = 0, 0.0
        for observation in self.observations:
            observation.forget()


def new_observation(loader: Any) -> Observation:
    """The observation of a `DataLoader` over which iteration begins."""
    batch_size, size = loader.batch_size, None
    with suppress(Exception):  # the script may never call `len()`; ignore errors
        size = len(loader.dataset)
    about = {
        "dataset": type(loader.dataset).__name__,
        "samples": size,
        "sampler": type(_sampler(loader)).__name__,
        "drop_last": loader.drop_last,
        "batch_size": getattr(loader.batch_sampler, "batch_size", None) if batch_size is None else batch_size,
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        "where": _calling_line(),
    }
    samples = None if loader.batch_sampler is None else (loader.dataset, loader.collate_fn, type(loader))
    return Observation(weakref.WeakSet([loader]), about, samples)


def _sampler(loader: Any) -> Any:
    """What chooses the samples; with a batch sampler of the user or of Accelerate, the sampler inside it."""
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    while inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None):
        sampler = inner
    return sampler


def _calling_line() -> str:
    """File and line of the user's code that iterates, not of a library such as tqdm that does so for it."""
    callers = []
    frame: FrameType | None = inspect.currentframe()
    while frame:
        if not frame.f_code.co_filename.startswith((str(Path(__file__).parent), "<frozen")):
            callers.append(frame)
        frame = frame.f_back
    user = next((frame for frame in callers if not _is_of_library(frame.f_code.co_filename)), callers[0])
    return f"{display_path(user.f_code.co_filename)}:{user.f_lineno}"


def _is_of_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or not PACKAGES.isdisjoint(Path(file).parts)
