"""The loaders that a script iterates: their passes, steps, and the time spent waiting."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median_low
from traceback import walk_stack
from typing import TYPE_CHECKING

from vitmnist.runtime.files import display_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LIBRARY_PREFIXES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent), "<frozen")
"""Path prefixes of Python's standard library and of this package."""


@dataclass(frozen=True)
class LoaderInfo:
    """The settings of a loader, and the line of the script that first iterates it. Unknown values are None."""

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    where: str

    @classmethod
    def from_loader(cls, loader: DataLoader[object]) -> LoaderInfo:
        """Read the settings of a loader. Call this from the line that iterates the loader."""
        samples = None
        with suppress(Exception):  # The script may never call `len()`, so ignore its errors.
            samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return cls(type(loader.dataset).__name__, samples, batch_size, loader.num_workers, _find_script_line())


def _find_script_line() -> str:
    """Return the file and line of the innermost frame outside this package and installed packages, such as tqdm."""
    for frame, line in walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARY_PREFIXES) and {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
            return f"{display_path(file)}:{line}"
    return "in an installed package"


@dataclass
class DataPass:
    """A pass over a loader with an iterator. Times are from `perf_counter`."""

    start: float  # The start of `iter()`
    last_return: float  # The end of the latest `next()`
    next_start: float | None = None  # The start of the next pass over any loader
    iterator_ref: Callable[[], object] = object  # A weak reference to the iterator
    batches: int = 0
    is_exhausted: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the script can still request batches."""
        return not self.is_exhausted and self.iterator_ref() is not None


@dataclass
class ObservedLoader:
    """All passes over one `DataLoader`, or over several with the same settings that are built one after another.

    Args:
        rebuilt_loader: a plain `DataLoader` with the settings of the latest loader; None if it cannot be built.
        steps_s, steps_cpu_s: seconds of each step, from `next()` to the next call, and their total processor time.
        is_in_other_thread: another thread iterates the loader, so the waiting time of the main thread is unknown.
    """

    info: LoaderInfo
    loader_ref: Callable[[], object] = object
    rebuilt_loader: DataLoader[object] | None = None
    passes: list[DataPass] = field(default_factory=list)
    batches: int = 0
    waiting_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    steps_cpu_s: float = 0.0
    is_in_other_thread: bool = False

    @property
    def step_s(self) -> float:
        """Duration of the median step (s). If every pass has a single batch, a step lasts until the next pass."""
        between_passes_s = [p.next_start - p.last_return for p in self.passes if p.batches and p.next_start]
        return median_low(self.steps_s or between_passes_s or [0.0])

    @property
    def epoch_length(self) -> int | None:
        """Number of batches in an epoch; None if the loader has no length and no pass has reached its end."""
        if self.rebuilt_loader is not None:
            with suppress(Exception):  # The script may never call `len()`, so ignore its errors.
                return len(self.rebuilt_loader)
        return max((p.batches for p in self.passes if p.is_exhausted and p.batches), default=None)

    def reset(self, now: float) -> None:
        """Discard all measurements, and let open passes start now."""
        self.passes = [p for p in self.passes if p.is_open]
        for data_pass in self.passes:
            data_pass.start = data_pass.last_return = now
            data_pass.next_start, data_pass.batches = None, 0
        self.batches, self.waiting_s, self.steps_s, self.steps_cpu_s = 0, 0.0, [], 0.0


def sum_passes(loaders: Iterable[ObservedLoader], end: float) -> float:
    """Return the seconds of all passes until `end`. Overlapping passes count once."""
    intervals = []
    for loader in loaders:
        step_s = loader.step_s
        for data_pass in loader.passes:
            # After a `break`, assume that the work on the last batch takes a median step, or ends at the next pass.
            last_step_s = 0.0 if data_pass.is_exhausted else step_s
            stop = min(data_pass.last_return + last_step_s, data_pass.next_start or inf, end)
            intervals.append((data_pass.start, stop))
    seconds, counted_until = 0.0, -inf
    for start, stop in sorted(intervals):
        seconds += max(stop - max(start, counted_until), 0.0)
        counted_until = max(counted_until, stop)
    return seconds
