"""The loops of a script: their loaders, passes, steps, and the time spent waiting."""

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
"""The prefixes of the paths of files that belong to Python's standard library or to this package."""
COLLECTS = "collects its batches, and works on them later"
OTHER_THREAD = "is iterated in another thread than the main one"
COLLECTING_S = 0.0002
"""The smallest median step in seconds of a loop that works on its batches while it keeps them."""


@dataclass(frozen=True)
class LoaderInfo:
    """The settings of a loader, and the line of the script that iterates it first; None if unknown."""

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    where: str

    @classmethod
    def of(cls, loader: DataLoader[object]) -> LoaderInfo:
        samples = None
        with suppress(Exception):  # An error of `len()` does not concern a script that never calls it.
            samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return cls(type(loader.dataset).__name__, samples, batch_size, loader.num_workers, _line_of_script())


def _line_of_script() -> str:
    """The file and line of the innermost frame outside this package and libraries such as tqdm."""
    for frame, line in walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARY_PREFIXES) and {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
            return f"{display_path(file)}:{line}"
    return "in an installed package"


@dataclass
class LoaderPass:
    """The use of one iterator, from `iter()` to `last_return`, the end of the last `next()`.

    Args:
        next_start: the start of the next pass after that; None if there is none.
        iterator_ref, first_batch_ref: weak references to the iterator and to its first batch.
    """

    start: float
    last_return: float
    next_start: float | None = None
    iterator_ref: Callable[[], object] = object
    first_batch_ref: Callable[[], object] = object
    batches: int = 0
    is_exhausted: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the script can request further batches."""
        return not self.is_exhausted and self.iterator_ref() is not None


@dataclass
class Loop:
    """All passes over one `DataLoader`, or over several with the same settings that are built in turn.

    Args:
        plain_copy: a plain `DataLoader` with the settings of the last loader; None if it cannot be built.
        steps_s, steps_cpu_s: the seconds between consecutive calls of `next()`, and their processor time in total.
        unmeasured_reason: why the share of waiting is unknown.
    """

    info: LoaderInfo
    loader_ref: Callable[[], object] = object
    plain_copy: DataLoader[object] | None = None
    passes: list[LoaderPass] = field(default_factory=list)
    batches: int = 0
    waiting_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    steps_cpu_s: float = 0.0
    unmeasured_reason: str | None = None

    @property
    def step_s(self) -> float:
        """The seconds of the median step. If each pass has a single batch, a step lasts until the next pass."""
        single = [pass_.next_start - pass_.last_return for pass_ in self.passes if pass_.batches and pass_.next_start]
        steps_s = self.steps_s or single
        return median_low(steps_s) if steps_s else 0.0

    @property
    def epoch_length(self) -> int | None:
        """The number of batches in an epoch; None if the loader has no length and no pass has reached its end."""
        if self.plain_copy is not None:
            with suppress(Exception):  # An error of `len()` does not concern a script that never calls it.
                return len(self.plain_copy)
        return max((pass_.batches for pass_ in self.passes if pass_.is_exhausted and pass_.batches), default=None)

    def mark_if_collecting(self) -> None:
        """Set `unmeasured_reason` if the script keeps the batches and does not work between requests for them."""
        is_kept = any(pass_.batches > 1 and pass_.first_batch_ref() is not None for pass_ in self.passes)
        if is_kept and self.step_s < COLLECTING_S:
            self.unmeasured_reason = self.unmeasured_reason or COLLECTS

    def reset(self, now: float) -> None:
        """Discard all measurements; open passes start now."""
        self.passes = [pass_ for pass_ in self.passes if pass_.is_open]
        for pass_ in self.passes:
            pass_.start, pass_.last_return, pass_.next_start, pass_.batches = now, now, None, 0
        self.batches, self.waiting_s, self.steps_s, self.steps_cpu_s = 0, 0.0, [], 0.0


def merge_passes(loops: Iterable[Loop], end: float) -> list[tuple[float, float]]:
    """The start and end of all passes up to the time `end`, in order; overlapping passes are merged."""
    intervals = []
    for loop in loops:
        step_s = loop.step_s
        for pass_ in loop.passes:
            # After a `break`, the script works on the last batch for a step, or until another pass.
            last_step_s = 0.0 if pass_.is_exhausted else step_s
            intervals.append((pass_.start, min(pass_.last_return + last_step_s, pass_.next_start or inf, end)))
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
