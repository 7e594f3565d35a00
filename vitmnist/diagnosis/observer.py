"""A stopwatch for the loaders of a script. It wraps `DataLoader.__iter__`, and times each call of `next()`.

This module does not import torch, because the script can set environment variables before it imports torch.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import current_thread, get_ident, main_thread
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from vitmnist.diagnosis.observed_loader import DataPass, LoaderInfo, ObservedLoader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Observer:
    """Times the passes over the `DataLoader`s of this process.

    An audit hook (`_wrap_torch`) waits for torch, and wraps `DataLoader.__iter__` and that of each subclass. It then
    returns an `ObservedIterator` (`_iterate`), whose calls of `next` add to the times of an `ObservedLoader`.

    Args:
        steps: observe until a loader has delivered this many batches after the warm-up; None: until the end.
        warm_up: ignore all batches until a loader has delivered this many.
        stops_script: end the script after `steps`.
    """

    def __init__(self, steps: int | None, warm_up: int, stops_script: bool) -> None:
        self.steps, self.warm_up, self.stops_script = steps, warm_up, stops_script
        self.loaders: list[ObservedLoader] = []
        self.end_time: float | None = None
        self.is_stopped = False
        self.warm_up_done = not warm_up
        self.process_id = os.getpid()
        self._threads_inside: set[int] = set()
        """The identifiers of the threads that are inside a call of a loader."""
        self._wrapped_classes: set[type] = set()
        self._wrap_torch("import", ())
        sys.addaudithook(self._wrap_torch)

    @property
    def is_active(self) -> bool:
        """Whether to record this call. False after `end`, in a forked child, and inside another loader's call."""
        is_inside = get_ident() in self._threads_inside
        return self.end_time is None and not is_inside and os.getpid() == self.process_id

    @contextmanager
    def waiting(self, observed_loader: ObservedLoader, data_pass: DataPass, start: float) -> Iterator[None]:
        """Add the time from `start` to the end of the block to the waiting time of a loader."""
        thread = get_ident()
        self._threads_inside.add(thread)
        try:
            yield
        finally:
            self._threads_inside.discard(thread)
            if self.end_time is None:
                data_pass.last_return, data_pass.next_start = perf_counter(), None
                observed_loader.waiting_s += data_pass.last_return - start
                observed_loader.is_in_other_thread |= current_thread() is not main_thread()

    def check_limits(self) -> None:
        """End the warm-up or the observation after enough batches. With `stops_script`, the end raises `SystemExit`."""
        batches = max((observed_loader.batches for observed_loader in self.loaders), default=0)
        if not self.warm_up_done and batches >= self.warm_up:
            self.warm_up_done = True
            for observed_loader in self.loaders:
                observed_loader.reset(perf_counter())
        elif self.warm_up_done and self.steps is not None and batches >= self.steps:
            self.end()
            if self.stops_script and current_thread() is main_thread():
                self.is_stopped = True
                sys.exit(0)

    def end(self) -> None:
        self.end_time = self.end_time or perf_counter()

    def _wrap_torch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook that wraps `DataLoader` at the first import event after torch has defined it."""
        if event != "import" or self._wrapped_classes:
            return
        loader_class: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "DataLoader", None)
        if loader_class is None:
            return
        self._wrap_iter(loader_class)
        original_init = loader_class.__init__

        @wraps(original_init)
        def observed_init(loader: DataLoader[object], *args: object, **kwargs: object) -> None:
            # Import here so that the first pass does not include the import.
            import vitmnist.replacement.original_dataloader  # noqa: F401

            original_init(loader, *args, **kwargs)
            for base in type(loader).__mro__:
                if issubclass(base, loader_class):
                    self._wrap_iter(base)

        loader_class.__init__ = observed_init

    def _wrap_iter(self, loader_class: Any) -> None:
        original_iter = vars(loader_class).get("__iter__")
        if original_iter is not None and loader_class not in self._wrapped_classes:
            self._wrapped_classes.add(loader_class)
            loader_class.__iter__ = wraps(original_iter)(lambda loader: self._iterate(loader, original_iter))

    def _iterate(self, loader: DataLoader[object], original_iter: Callable[..., Iterator[object]]) -> Iterator[object]:
        """Begin a pass over a loader. Record it unless it is internal."""
        from vitmnist.store.read_in_chunks import ChunkDataset  # Imports torch.

        is_internal = isinstance(loader.dataset, ChunkDataset)
        if self.is_active and not is_internal:
            self.check_limits()
        if not self.is_active or is_internal:
            return original_iter(loader)
        observed_loader = self._get_observed_loader(loader)
        now = perf_counter()
        for earlier in (other.passes[-1] for other in self.loaders if other.passes):
            earlier.next_start = earlier.next_start or now
        data_pass = DataPass(now, now)
        observed_loader.passes.append(data_pass)
        with self.waiting(observed_loader, data_pass, now):
            iterator = original_iter(loader)
        return ObservedIterator(self, observed_loader, data_pass, iterator)

    def _get_observed_loader(self, loader: DataLoader[object]) -> ObservedLoader:
        """Return the record of a loader. Loaders that are built for each epoch share a record."""
        from vitmnist.replacement.original_dataloader import rebuild  # Imports torch.

        for observed_loader in self.loaders:
            if observed_loader.loader_ref() is loader:
                return observed_loader
        info = LoaderInfo.from_loader(loader)
        for observed_loader in self.loaders:
            if observed_loader.info == info and not any(p.is_open for p in observed_loader.passes):
                break
        else:
            observed_loader = ObservedLoader(info)
            self.loaders.append(observed_loader)
        observed_loader.loader_ref, observed_loader.rebuilt_loader = weakref.ref(loader), None
        with suppress(Exception):  # A subclass may lack any attribute.
            observed_loader.rebuilt_loader = rebuild(loader)
        return observed_loader


class ObservedIterator:
    """Times the calls of `next()` on an iterator. Its length and attributes are forwarded."""

    def __init__(
        self, observer: Observer, loader: ObservedLoader, data_pass: DataPass, iterator: Iterator[object]
    ) -> None:
        self._observer, self._loader, self._data_pass, self._iterator = observer, loader, data_pass, iterator
        self._step_start: float | None = None
        self._step_cpu_start = 0.0
        data_pass.iterator_ref = weakref.ref(self)

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)

    def __next__(self) -> object:
        # Read the clock first: a busy machine can suspend this thread in any line below, and that time is waiting.
        now = perf_counter()
        loader, data_pass = self._loader, self._data_pass
        if self._observer.is_active:
            if self._step_start is not None:
                loader.steps_s.append(now - self._step_start)
                loader.steps_cpu_s += process_time() - self._step_cpu_start
            self._observer.check_limits()
        if not self._observer.is_active:
            return next(self._iterator)
        try:
            with self._observer.waiting(loader, data_pass, now):
                batch = next(self._iterator)
        except StopIteration:
            data_pass.is_exhausted = True
            raise
        loader.batches += 1
        data_pass.batches += 1
        self._step_start, self._step_cpu_start = data_pass.last_return, process_time()
        return batch
