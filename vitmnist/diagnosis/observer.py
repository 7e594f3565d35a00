"""A stopwatch for the loops of a script over its `DataLoader`s: passes, waiting inside `next()`, and steps.

This module does not import torch: a script may set environment variables before it does.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from itertools import takewhile
from math import inf
from pathlib import Path
from statistics import median_low
from threading import get_ident, main_thread
from time import perf_counter, process_time
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar

from vitmnist.runtime.files import display_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Argument = TypeVar("Argument")
Result = TypeVar("Result")

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent), "<frozen")
"""How the files of Python's library and of this package begin."""
PACKAGES = {"site-packages", "dist-packages"}  # Folders with installed packages, in any environment
COLLECTING_S = 0.0002  # If the median step is shorter and the batches are kept, the loop works on them later.


class Unmeasured(str, Enum):
    """Why the share of waiting of a loop is not known."""

    COLLECTS = "collects its batches, and works on them later"
    OTHER_THREAD = "is iterated in another thread than the main one"


@dataclass(frozen=True)
class LoaderInfo:
    """The settings of a loader, and the line of the script that iterates it; None is unknown.

    Args:
        own_iteration: the class that iterates in its own way, such as Accelerate's `DataLoaderShard`; None: torch's.
    """

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    where: str
    own_iteration: str | None = None

    @classmethod
    def of(cls, loader: DataLoader[object]) -> LoaderInfo:
        """The settings of a loader over which a pass begins."""
        samples = None
        with suppress(Exception):  # The script may never call `len()`; ignore errors.
            samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        subclasses = takewhile(lambda kind: kind.__name__ != "DataLoader", type(loader).__mro__)
        own_iteration = next((kind.__name__ for kind in subclasses if "__iter__" in vars(kind)), None)
        dataset = type(loader.dataset).__name__
        return cls(dataset, samples, batch_size, loader.num_workers, _calling_line(), own_iteration)


def _calling_line() -> str:
    """File and line of the user's code that iterates, not of a library such as tqdm that does so for it."""
    for frame, line in walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) and PACKAGES.isdisjoint(Path(file).parts):
            return f"{display_path(file)}:{line}"
    return "in an installed package"


@dataclass
class Pass:
    """One use of an iterator, from `iter()` on; times are readings of the clock.

    Args:
        last: the end of its last `next()`.
        iterator_ref: a weak reference to the iterator; `first_batch_ref` is one to its first batch.
        next_iter: when another pass began after its last `next()`.
    """

    began: float
    last: float
    iterator_ref: Callable[[], object] = object
    first_batch_ref: Callable[[], object] = object
    batches: int = 0
    is_exhausted: bool = False
    next_iter: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return not self.is_exhausted and self.iterator_ref() is not None

    def end(self, step_s: float) -> float:
        """Its end; after a `break`, the script works on the last batch for a step, or until the next pass."""
        return self.last if self.is_exhausted else min(self.last + step_s, self.next_iter or inf)


@dataclass
class Loop:
    """All passes over one `DataLoader`, or over several alike in turn.

    Args:
        copy: a plain `DataLoader` with the settings of the last one; None if it cannot be built. The script may have
            dropped its own.
        loader_ref: a weak reference to the last one.
        steps_s: times between two requests for batches; `steps_cpu_s` is the processor time of all of them.
    """

    info: LoaderInfo
    copy: DataLoader[object] | None
    loader_ref: Callable[[], object] = object
    passes: list[Pass] = field(default_factory=list)
    batches: int = 0
    waiting_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    steps_cpu_s: float = 0.0
    unmeasured: Unmeasured | None = None

    @property
    def step_s(self) -> float:
        """The median step; of passes with a single batch, the time up to the next pass."""
        single = [pass_.next_iter - pass_.last for pass_ in self.passes if pass_.batches == 1 and pass_.next_iter]
        steps_s = self.steps_s or single
        return median_low(steps_s) if steps_s else 0.0

    @property
    def epoch_length(self) -> float | None:
        """How many batches an epoch has; None if the loader does not say, and no pass has reached its end."""
        with suppress(Exception):  # The script may never call `len()`; ignore errors.
            return len(self.copy) if self.copy is not None else None
        complete = [pass_.batches for pass_ in self.passes if pass_.is_exhausted and pass_.batches]
        return max(complete, default=None)

    @property
    def cores(self) -> float:
        """Processor cores in use by this process during a step."""
        return self.steps_cpu_s / (sum(self.steps_s) or inf)

    @property
    def is_open(self) -> bool:
        """Whether its last pass may go on; if not, another loader with the same settings may continue the loop."""
        return any(pass_.is_open for pass_ in self.passes[-1:])

    def intervals(self, ended: float) -> list[tuple[float, float]]:
        """Begin and end of each pass, up to the end of the observation."""
        step_s = self.step_s
        return [(pass_.began, min(pass_.end(step_s), ended)) for pass_ in self.passes]

    def note_collecting(self, pass_: Pass) -> None:
        """Note whether the loop keeps the batches of a pass, and hardly works between requests for them."""
        if pass_.batches > 1 and self.step_s < COLLECTING_S and pass_.first_batch_ref() is not None:
            self.unmeasured = self.unmeasured or Unmeasured.COLLECTS

    def forget(self, now: float) -> None:
        """Drop what was measured of the warm-up; a pass that goes on begins now."""
        self.passes = [pass_ for pass_ in self.passes if pass_.is_open]
        for pass_ in self.passes:
            pass_.began, pass_.last, pass_.batches, pass_.next_iter = now, now, 0, None
        self.batches, self.waiting_s, self.steps_s, self.steps_cpu_s = 0, 0.0, [], 0.0


class Observer:
    """Times the passes over the `DataLoader`s of this process, from the import of torch on.

    Args:
        steps: how many batches to observe after the warm-up, of the loader that gives most; None: all of the script.
        warm_up: batches before that.
        stop: end the script then.
    """

    def __init__(self, steps: int | None, warm_up: int, stop: bool) -> None:
        self.steps, self.warm_up, self.stop = steps, warm_up, stop
        self.loops: list[Loop] = []
        self.ended: float | None = None
        self.is_stopped = False
        self.is_warm = not warm_up
        self._threads_inside: set[int] = set()  # Threads that are within a call of a loader
        self._observed: set[type] = set()
        if hasattr(os, "register_at_fork"):  # Ranks and workers of the script must not be ended by its --stop.
            os.register_at_fork(after_in_child=self.end)
        self._observe_torch("import", ())
        sys.addaudithook(self._observe_torch)  # An import event follows that of torch's module, which imports others.

    @property
    def is_inside(self) -> bool:
        """Whether this thread is within a call of a loader; a loader that it iterates there does not count."""
        return get_ident() in self._threads_inside

    def time_call(self, loop: Loop, pass_: Pass, call: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call a function of a loader, and add its duration to the waiting of the loop."""
        thread = get_ident()
        self._threads_inside.add(thread)
        began = perf_counter()
        try:
            return call(argument)
        finally:
            self._threads_inside.discard(thread)
            if not self.ended:
                pass_.last, pass_.next_iter = perf_counter(), None
                loop.waiting_s += pass_.last - began
                if thread != main_thread().ident:
                    loop.unmeasured = Unmeasured.OTHER_THREAD

    def check_limits(self) -> None:
        """End the warm-up or the observation if it is time; raises `SystemExit` with `stop`."""
        if self.ended:
            return
        most = max((loop.batches for loop in self.loops), default=0)
        if not self.is_warm and most >= self.warm_up:
            self.is_warm = True
            for loop in self.loops:
                loop.forget(perf_counter())
        elif self.is_warm and self.steps is not None and most >= self.steps:
            self.end()
            if self.stop and get_ident() == main_thread().ident:
                self.is_stopped = True
                sys.exit(0)

    def end(self) -> None:
        """Observe no more."""
        if not self.ended:
            self.ended = perf_counter()
            for loop in self.loops:
                for pass_ in loop.passes[-1:]:
                    loop.note_collecting(pass_)

    def _observe_torch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Observe torch's loaders once they are defined; an audit hook."""
        if event != "import" or self._observed:
            return
        loader_class: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "DataLoader", None)
        if not loader_class:
            return
        self._observe(loader_class)
        make = loader_class.__init__

        @wraps(make)
        def make_and_observe(loader: DataLoader[object], *arguments: object, **named: object) -> None:
            import vitmnist.replacement.from_dataloader  # noqa: F401  # Here, so that the first `iter()` does not take longer

            make(loader, *arguments, **named)
            for base in type(loader).__mro__:
                if issubclass(base, loader_class) and base not in self._observed:
                    self._observe(base)

        loader_class.__init__ = make_and_observe

    def _observe(self, loader_class: Any) -> None:
        """Wrap the `__iter__` that a class defines itself."""
        self._observed.add(loader_class)
        if iterate := vars(loader_class).get("__iter__"):

            @wraps(iterate)
            def begin(loader: DataLoader[object]) -> object:
                if self.ended or self.is_inside or hasattr(loader, "is_internal"):
                    return iterate(loader)
                return self._begin_pass(loader, iterate)

            loader_class.__iter__ = begin

    def _begin_pass(
        self, loader: DataLoader[object], iterate: Callable[[DataLoader[object]], Iterator[object]]
    ) -> Iterator[object]:
        self.check_limits()
        loop = self._loop_of(loader)
        now = perf_counter()
        for other in self.loops:
            for pass_ in other.passes[-1:]:
                pass_.next_iter = pass_.next_iter or now
        loop.passes.append(Pass(now, now))
        iterator = self.time_call(loop, loop.passes[-1], iterate, loader)
        return ObservedIterator(self, loop, loop.passes[-1], iterator)

    def _loop_of(self, loader: DataLoader[object]) -> Loop:
        """The loop that a new pass over a loader belongs to."""
        from vitmnist.replacement.original import rebuild  # Not at the top: it imports torch

        for loop in self.loops:
            if loop.loader_ref() is loader:
                return loop
        info = LoaderInfo.of(loader)
        copy = None
        with suppress(Exception):  # A subclass may lack any attribute.
            copy = rebuild(loader)
        alike = next((loop for loop in self.loops if loop.info == info and not loop.is_open), None)
        if alike is None:
            alike = Loop(info, copy)
            self.loops.append(alike)
        alike.copy, alike.loader_ref = copy, weakref.ref(loader)
        return alike


class ObservedIterator:
    """Hands on the batches of an iterator, and its other attributes."""

    def __init__(self, observer: Observer, loop: Loop, pass_: Pass, iterator: Iterator[object]) -> None:
        self._observer, self._loop, self._pass, self._iterator = observer, loop, pass_, iterator
        self._returned: tuple[float, float] | None = None  # Clock and processor time at the last batch
        pass_.iterator_ref = weakref.ref(self)

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)

    def __next__(self) -> object:
        observer, loop, pass_ = self._observer, self._loop, self._pass
        if observer.is_inside:
            return next(self._iterator)
        if self._returned and not observer.ended:
            loop.steps_s.append(perf_counter() - self._returned[0])
            loop.steps_cpu_s += process_time() - self._returned[1]
        observer.check_limits()
        try:
            batch = observer.time_call(loop, pass_, next, self._iterator)
        except StopIteration:
            if not observer.ended:
                pass_.is_exhausted = True
                loop.note_collecting(pass_)
            raise
        if not observer.ended:
            loop.batches += 1
            pass_.batches += 1
        if not self._returned:
            pass_.first_batch_ref = _reference(batch)
        self._returned = perf_counter(), process_time()
        return batch


def _reference(batch: object) -> Callable[[], object]:
    """A weak reference to a batch, or to the first part of it that can have one; others count as kept."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    with suppress(TypeError):
        return weakref.ref(batch)
    return object
