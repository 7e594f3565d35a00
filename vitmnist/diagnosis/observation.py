"""What is measured of each loop over a `DataLoader` of a user's script."""

from __future__ import annotations

import inspect
import sysconfig
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import TYPE_CHECKING, Any

from vitmnist.runtime.files import display_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent))
PACKAGES = {"site-packages", "dist-packages"}  # Also those of another environment
COLLECTING_S = 0.0002  # Below this time of a step, a loop that keeps its batches works on them later


class Unmeasured(str, Enum):
    """Why the share of waiting of a loop is not known."""

    COLLECTS = "collects its batches, and works on them later"
    OTHER_THREAD = "is iterated in another thread than the main one"


@dataclass(frozen=True)
class Limits:
    """How many batches to observe after the warm-up, of the loader that gives most; `stop` ends the script then.

    Args:
        steps: None observes up to the end of the script.
    """

    steps: int | None
    warm_up: int
    stop: bool


@dataclass(frozen=True)
class LoaderInfo:
    """The settings of a loader, and the line of the script that iterates it; None is unknown."""

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    where: str

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderInfo:
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
    copy: DataLoader[Any] | None
    kind: type
    loaders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    num_loaders: int = 0
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
        single = [one.next_iter - one.last for one in self.passes if one.batches == 1 and one.next_iter]
        steps_s = self.steps_s or single
        return median_low(steps_s) if steps_s else 0.0

    @property
    def cores(self) -> float:
        """Processor cores in use by this process during a step."""
        return self.steps_cpu_s / (sum(self.steps_s) or inf)

    def intervals(self, ended: float) -> list[tuple[float, float]]:
        """Begin and end of each pass, up to the end of the observation; after a `break`, a step is added."""
        step_s = self.step_s
        ends = (one.last if one.is_exhausted else min(one.last + step_s, one.next_iter or inf) for one in self.passes)
        return [(one.began, min(end, ended)) for one, end in zip(self.passes, ends, strict=True)]

    def note_collecting(self, this: Pass) -> None:
        """Note whether the loop keeps the batches of a pass, and hardly works between requests for them."""
        if this.batches > 1 and self.step_s < COLLECTING_S and this.first_batch() is not None:
            self.unmeasured = self.unmeasured or Unmeasured.COLLECTS

    def forget(self, now: float) -> None:
        """Drop what was measured of the warm-up; a pass that goes on begins now."""
        self.passes = [one for one in self.passes if one.is_open]
        for one in self.passes:
            one.began, one.last, one.batches, one.next_iter = now, now, 0, None
        self.batches, self.waiting_s, self.steps_s, self.steps_cpu_s = 0, 0.0, [], 0.0


def copy_of(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A plain `DataLoader` with the arguments of another one, some of them changed."""
    from torch.utils.data import DataLoader, IterableDataset  # a loader has imported it

    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order"]
    if changed.get("num_workers", loader.num_workers):
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    if isinstance(loader.dataset, IterableDataset):
        names += ["batch_size", "drop_last"] if loader.batch_size else ["batch_size"]
    elif loader.batch_size is None and loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "sampler", "drop_last"]
    return DataLoader(**{name: getattr(loader, name) for name in names} | changed)


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
