"""The loops of a script over its `DataLoader`s: passes, waiting and steps. Does not import torch."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import Path
from statistics import median_low
from traceback import walk_stack
from typing import TYPE_CHECKING

from vitmnist.runtime.files import display_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent), "<frozen")
"""How the files of Python's library and of this package begin."""
PACKAGES = {"site-packages", "dist-packages"}  # Folders with installed packages, also those of another environment
COLLECTING_S = 0.0002  # If the median step is shorter and the batches are kept, the loop works on them later.


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
        with suppress(Exception):  # The script may never call `len()`; ignore errors.
            samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return cls(type(loader.dataset).__name__, samples, batch_size, loader.num_workers, _calling_line())


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
    def cores(self) -> float:
        """Processor cores in use by this process during a step."""
        return self.steps_cpu_s / (sum(self.steps_s) or inf)

    def includes(self, loader: DataLoader[object], info: LoaderInfo) -> bool:
        """Whether a new pass over a loader belongs here: some scripts build a loader for each epoch."""
        is_open = any(pass_.is_open for pass_ in self.passes[-1:])
        return self.loader_ref() is loader or (self.info == info and not is_open)

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
