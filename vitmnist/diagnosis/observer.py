"""A stopwatch for every `DataLoader` of this process: the time inside `iter()` and `next()`, and between them.

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
from itertools import compress
from math import inf
from pathlib import Path
from statistics import median_low
from threading import get_ident, main_thread
from time import perf_counter, process_time
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar

from vitmnist.runtime.cpu import CpuClock
from vitmnist.runtime.files import display_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent))
Argument = TypeVar("Argument")
Result = TypeVar("Result")
PACKAGES = {"site-packages", "dist-packages"}  # Also those of another environment
COLLECTING_S = 0.0002  # Below this time of a step, a loop that keeps its batches works on them later


class Unmeasured(str, Enum):
    """Why the share of waiting of a loop is not known."""

    COLLECTS = "collects its batches, and works on them later"
    OTHER_THREAD = "is iterated in another thread than the main one"


@dataclass(frozen=True)
class LoaderInfo:
    """The settings of a loader, and the line of the script that iterates it; None is unknown."""

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    where: str

    @classmethod
    def of(cls, loader: DataLoader[object]) -> LoaderInfo:
        """The settings of a loader over which a pass begins."""
        samples = None
        with suppress(Exception):  # the script may never call `len()`; ignore errors
            samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return cls(type(loader.dataset).__name__, samples, batch_size, loader.num_workers, _calling_line())


@dataclass
class Pass:
    """One use of an iterator, from `iter()` on.

    Args:
        last: the end of its last `next()`.
        iterator: a weak reference; `first_batch` is one to its first batch.
        next_iter: when another pass began after its last `next()`.
    """

    began: float
    last: float
    iterator: Callable[[], object]
    first_batch: Callable[[], object] = object
    batches: int = 0
    is_exhausted: bool = False
    next_iter: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return not self.is_exhausted and self.iterator() is not None


@dataclass
class Loop:
    """All passes over one `DataLoader`, or over several alike in turn.

    Args:
        copy: a plain `DataLoader` with the settings of the last one, which the script may have dropped; None if it
            cannot be built.
        kind: the class of the script's own.
        loaders: those that still exist.
        steps_s: times between two requests for batches; `steps_cpu_s` is the processor time of all of them.
    """

    info: LoaderInfo
    copy: DataLoader[object] | None
    kind: type
    loaders: weakref.WeakSet[DataLoader[object]] = field(default_factory=weakref.WeakSet)
    passes: list[Pass] = field(default_factory=list)
    batches: int = 0
    waiting_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    steps_cpu_s: float = 0.0
    unmeasured: Unmeasured | None = None

    @property
    def has_own_iteration(self) -> bool:
        """Whether the script's class does not iterate as a `DataLoader`, of which the copy is one."""
        return getattr(type(self.copy), "__iter__", None) is not getattr(self.kind, "__iter__", None)

    @property
    def step_s(self) -> float:
        """The median step; of passes with a single batch, the time up to the next pass."""
        single = [pass_.next_iter - pass_.last for pass_ in self.passes if pass_.batches == 1 and pass_.next_iter]
        steps_s = self.steps_s or single
        return median_low(steps_s) if steps_s else 0.0

    @property
    def cores(self) -> float:
        """Processor cores in use by this process during a step."""
        return self.steps_cpu_s / (sum(self.steps_s) or inf)

    def intervals(self, ended: float) -> list[tuple[float, float]]:
        """Begin and end of each pass, up to the end of the observation; after a `break`, a step is added."""
        step_s = self.step_s
        ends = (
            pass_.last if pass_.is_exhausted else min(pass_.last + step_s, pass_.next_iter or inf)
            for pass_ in self.passes
        )
        return [(pass_.began, min(end, ended)) for pass_, end in zip(self.passes, ends, strict=True)]

    def note_collecting(self, this: Pass) -> None:
        """Note whether the loop keeps the batches of a pass, and hardly works between requests for them."""
        if this.batches > 1 and self.step_s < COLLECTING_S and this.first_batch() is not None:
            self.unmeasured = self.unmeasured or Unmeasured.COLLECTS

    def forget(self, now: float) -> None:
        """Drop what was measured of the warm-up; a pass that goes on begins now."""
        self.passes = [pass_ for pass_ in self.passes if pass_.is_open]
        for pass_ in self.passes:
            pass_.began, pass_.last, pass_.batches, pass_.next_iter = now, now, 0, None
        self.batches, self.waiting_s, self.steps_s, self.steps_cpu_s = 0, 0.0, [], 0.0


def _calling_line() -> str:
    """File and line of the user's code that iterates, not of a library such as tqdm that does so for it."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_stack(inspect.currentframe())]
    callers = [caller for caller in frames if not caller[0].startswith((str(Path(__file__).parent), "<frozen"))]
    is_user = [not file.startswith(LIBRARIES) and PACKAGES.isdisjoint(Path(file).parts) for file, _ in callers]
    file, line = next(compress(callers, is_user), callers[0])
    return f"{display_path(file)}:{line}"


class ObservedIterator:
    """Hands on the batches of an iterator, and its other attributes."""

    def __init__(self, observer: Observer, loop: Loop, began: float) -> None:
        self._observer, self._loop, self._pass = observer, loop, Pass(began, began, weakref.ref(self))
        loop.passes.append(self._pass)
        self._iterator: Iterator[object] = iter(())
        self._returned: tuple[float, float] | None = None  # Clock and processor time at the last batch

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)

    def __next__(self) -> object:
        observer, loop, this = self._observer, self._loop, self._pass
        if observer.is_inside:
            return next(self._iterator)
        if self._returned and not observer.ended:
            loop.steps_s.append(perf_counter() - self._returned[0])
            loop.steps_cpu_s += process_time() - self._returned[1]
        observer.check_limits()
        try:
            batch = observer.wait(loop, this, next, self._iterator)
        except StopIteration:
            if not observer.ended:
                this.is_exhausted = True
                loop.note_collecting(this)
            raise
        if not observer.ended:
            loop.batches += 1
            this.batches += 1
        if not self._returned:
            this.first_batch = _reference(batch)
        self._returned = perf_counter(), process_time()
        return batch


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
        self.started = perf_counter()
        self.first_iter: float | None = None
        self.ended: float | None = None
        self.is_stopped = False
        self.is_warm = not warm_up
        self._inside: set[int] = set()  # The threads that are within a call of a loader
        self._process = os.getpid()
        self._observed: set[type] = set()
        self._cpu_clock = CpuClock()
        self.cores = self._cpu_clock.cores()
        """Processor cores in use from the warm-up to the end."""
        self._install("import", ())
        sys.addaudithook(self._install)  # An import event follows that of torch's module, which imports others

    @property
    def is_inside(self) -> bool:
        """Whether this thread is within a call of a loader; a loader that it iterates there does not count."""
        return get_ident() in self._inside

    def wait(self, loop: Loop, this: Pass, call: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call a function of a loader, and add its duration to the waiting of the loop."""
        thread = get_ident()
        self._inside.add(thread)
        began = perf_counter()
        try:
            return call(argument)
        finally:
            self._inside.discard(thread)
            if not self.ended:
                this.last, this.next_iter = perf_counter(), None
                loop.waiting_s += this.last - began
                if thread != main_thread().ident:
                    loop.unmeasured = Unmeasured.OTHER_THREAD

    def check_limits(self) -> None:
        """End the warm-up or the observation if it is time; raises `SystemExit` with `stop`."""
        if self.ended:
            return
        most = max((loop.batches for loop in self.loops), default=0)
        if not self.is_warm and most >= self.warm_up:
            self.is_warm, self._cpu_clock = True, CpuClock()
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
            self.ended, self.cores = perf_counter(), self._cpu_clock.cores()
            for loop in self.loops:
                for this in loop.passes[-1:]:
                    loop.note_collecting(this)

    def _install(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Observe torch's loaders once they are defined; an audit hook."""
        if event != "import" or self._observed:
            return
        kind: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "DataLoader", None)
        if not kind:
            return
        self._observe(kind)
        make = kind.__init__

        @wraps(make)
        def make_and_observe(loader: DataLoader[object], *arguments: object, **named: object) -> None:
            import vitmnist.replacement.original  # noqa: F401  # Here, so that it is not part of the first `iter()`

            make(loader, *arguments, **named)
            for base in type(loader).__mro__:
                if issubclass(base, kind) and base not in self._observed:
                    self._observe(base)

        kind.__init__ = make_and_observe

    def _observe(self, kind: Any) -> None:
        """Wrap the `__iter__` that a class defines itself."""
        self._observed.add(kind)
        if iterate := vars(kind).get("__iter__"):

            @wraps(iterate)
            def begin(loader: DataLoader[object]) -> object:
                # A worker or rank that was forked has no report.
                if self.ended or self.is_inside or os.getpid() != self._process or hasattr(loader, "is_internal"):
                    return iterate(loader)
                return self._begin(loader, iterate)

            kind.__iter__ = begin

    def _begin(
        self, loader: DataLoader[object], iterate: Callable[[DataLoader[object]], Iterator[object]]
    ) -> Iterator[object]:
        self.check_limits()
        loop = self._loop_of(loader)
        now = perf_counter()
        self.first_iter = self.first_iter or now
        for other in self.loops:
            for this in other.passes[-1:]:
                this.next_iter = this.next_iter or now
        observed = ObservedIterator(self, loop, now)
        observed._iterator = self.wait(loop, observed._pass, iterate, loader)
        return observed

    def _loop_of(self, loader: DataLoader[object]) -> Loop:
        """The loop of a loader, or of one like it in turn: some scripts build one per epoch."""
        from vitmnist.replacement.original import rebuilt  # Not at the top: it imports torch

        info = LoaderInfo.of(loader)
        copy = None
        with suppress(Exception):  # A subclass may lack any attribute
            copy = rebuilt(loader)
        for loop in self.loops:
            is_free = not any(pass_.is_open for pass_ in loop.passes[-1:])
            if loader in loop.loaders or (loop.info == info and is_free):
                break
        else:
            loop = Loop(info, copy, type(loader))
            self.loops.append(loop)
        loop.loaders.add(loader)
        loop.info, loop.copy = info, copy
        return loop


def _reference(batch: object) -> Callable[[], object]:
    """A weak reference to a batch, or to the first part of it that can have one; others count as kept."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    with suppress(TypeError):
        return weakref.ref(batch)
    return object
