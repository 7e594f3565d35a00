"""What is measured of each `DataLoader` of a user's script."""

from __future__ import annotations

import inspect
import multiprocessing
import sysconfig
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from vitmnist.runtime.files import display_path

LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent))
PACKAGES = {"site-packages", "dist-packages"}  # also those of another environment


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
class Source:
    """What makes the batches of a `DataLoader`; it is kept, because one that a function has built no longer exists."""

    dataset: Any
    collate: Any
    batches: dict[str, Any]
    """`sampler` and `batch_size`, or `batch_sampler`, as a `DataLoader` takes them."""
    kind: type


@dataclass
class Observation:
    """One `DataLoader`, or several alike in turn; the fields from `batches` on are measured after the warm-up."""

    loaders: weakref.WeakSet[Any]  # those that still exist
    about: dict[str, Any]  # the settings of the loader, and where it is iterated
    source: Source | None  # None if the dataset gives batches
    num_loaders: int = 1
    are_rebuilt: bool = True  # several are made one after another; False once one of them is iterated again
    in_other_thread: bool = False
    is_iterated: bool = False  # now
    epochs: int = 0
    passes: int = 0
    batches_seen: int = 0
    start_s: float = 0.0  # of the first epoch, up to its first batch
    warm_up_batches: int = 0
    batches: int = 0
    waiting_s: float = 0.0
    waiting_cpu_s: float = 0.0  # processor time of this process while it waited; 0 with workers
    measuring_s: float = 0.0  # by the observer within `iter()` and `next()`; no part of `waiting_s`
    restarts_s: float = 0.0  # the part of `waiting_s` for the first batches and the ends of epochs, and their workers

    def forget(self) -> None:
        """Drop what was measured of the warm-up."""
        self.warm_up_batches, self.batches, self.passes = self.batches, 0, 0
        self.waiting_s, self.waiting_cpu_s, self.measuring_s, self.restarts_s = 0.0, 0.0, 0.0, 0.0

    def figures(self) -> dict[str, Any]:
        """As plain values."""
        return self.about | {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


def new_observation(loader: Any) -> Observation:
    """The observation of a loader over which iteration begins; what it does not have is unknown."""
    from torch.utils.data import DataLoader, IterableDataset  # a loader has imported it

    get = partial(getattr, loader)
    settings = get("fake_l", loader)  # where fastai's DataLoader has them
    dataset, batch_sampler, batch_size = get("dataset", None), get("batch_sampler", None), get("batch_size", None)
    size = None
    with suppress(Exception):  # the script may never call `len()`; ignore errors
        size = len(dataset)
    if batch_size is None:
        batch_size = getattr(batch_sampler, "batch_size", get("bs", None))
    context = getattr(settings, "multiprocessing_context", None) or multiprocessing
    about = {
        "dataset": type(dataset).__name__,
        "samples": size,
        "sampler": _sampler_name(loader),
        "drop_last": get("drop_last", None),
        "batch_size": batch_size,
        "num_workers": getattr(settings, "num_workers", 0),
        "persistent_workers": getattr(settings, "persistent_workers", False),
        "start_method": context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "is_iterable": isinstance(dataset, IterableDataset),
        "where": _calling_line(),
    }
    gives_batches = isinstance(loader, DataLoader) and batch_sampler is None
    batches = {"sampler": get("sampler", None), "batch_size": batch_size}
    if get("batch_size", None) is None:
        batches = {"batch_sampler": batch_sampler}
    batches = {} if about["is_iterable"] else batches
    source = None if gives_batches else Source(dataset, get("collate_fn", None), batches, type(loader))
    return Observation(weakref.WeakSet([loader]), about, source)


def _sampler_name(loader: Any) -> str | None:
    """The class that chooses the samples; with a batch sampler of the user or of Accelerate, of the sampler inside it.

    None for torch's own placeholder, where a dataset chooses its samples itself.
    """
    sampler = getattr(loader, "batch_sampler" if getattr(loader, "batch_size", None) is None else "sampler", None)
    while inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None):
        sampler = inner
    name = type(sampler).__name__
    return None if sampler is None or name.startswith("_") else name


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
