"""Measures every `DataLoader` of this process from within its iterator: waiting, step, and the time to make a batch.

This module does not import torch: a script may set environment variables before it does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from time import perf_counter
from types import ModuleType
from typing import Any

from vitmnist.diagnosis.observation import FetchTimes, Limits, Observation, new_observation


class ThreadState(threading.local):
    """What the observed loaders of one thread share."""

    fetch_times: FetchTimes | None = None  # of the loader whose iterator is being created
    waited_s = 0.0  # for batches of any observed loader


class ObservedIterator:
    """The iterator of a `DataLoader`, with four readings of the clock per batch."""

    def __init__(self, iterator: Iterator[Any], observation: Observation, start_s: float, thread: ThreadState) -> None:
        self._iterator = iterator
        self._observation = observation
        self._start_s = start_s  # of the workers; part of the wait for the first batch
        self._thread = thread
        self._batches = 0
        self._waiting_s: float | None = None  # for the batch that the script has now
        self._step_began = 0.0
        self._waited_s = 0.0  # by this thread, when the step began

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __next__(self) -> Any:
        asked = perf_counter()
        if self._waiting_s is not None:
            self._end_step(self._waiting_s, asked)
        waited_s = self._thread.waited_s
        started = perf_counter()
        try:
            batch = next(self._iterator)
        finally:
            arrived = perf_counter()
            # Not added up: `waited_s` may have grown meanwhile, if this loader iterates over another one.
            self._waited_s = self._thread.waited_s = waited_s + arrived - started
        self._batches += 1
        is_first = self._batches == 1
        self._waiting_s = arrived - started + (self._start_s if is_first else 0.0)
        observation = self._observation
        observation.add_batch(self._waiting_s, is_first)
        self._step_began = perf_counter()
        observation.overhead_s += started - asked + self._step_began - arrived
        return batch

    def _end_step(self, waiting_s: float, asked: float) -> None:
        waited_for_others_s = self._thread.waited_s - self._waited_s
        step_s = max(asked - self._step_began - waited_for_others_s, 0.0)  # negative if another thread has begun it
        self._waiting_s = None
        is_last = self._observation.add_step(waiting_s, step_s, is_first=self._batches == 1)
        # In another thread, SystemExit would end that thread alone, and the script could wait for it for ever.
        if is_last and self._observation.limits.stop and threading.current_thread() is threading.main_thread():
            sys.exit(0)


class Observer:
    """Replaces `DataLoader.__iter__` in this process, as soon as the script imports torch."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.observations: list[Observation] = []
        self._process = os.getpid()
        self._thread = ThreadState()
        sys.meta_path.insert(0, AfterImport("torch.utils.data.dataloader", self._install))

    def _install(self, module: Any) -> None:
        iterate, create_fetcher = module.DataLoader.__iter__, module._DatasetKind.create_fetcher

        def observed_iter(loader: Any) -> Any:
            # A worker or rank that was forked has no report.
            if os.getpid() != self._process or getattr(loader, "is_internal", False):
                return iterate(loader)
            observation, thread = self._observation_of(loader), self._thread
            thread.fetch_times, waited_s = observation.fetch_times, thread.waited_s
            started = perf_counter()
            try:
                iterator = iterate(loader)
            finally:
                start_s = perf_counter() - started
                thread.fetch_times, thread.waited_s = None, waited_s + start_s
            return ObservedIterator(iterator, observation, start_s, thread)

        def timed_create_fetcher(*arguments: Any) -> Any:
            """Also called in each worker, which is forked while `fetch_times` is set."""
            fetcher = create_fetcher(*arguments)
            if times := self._thread.fetch_times:
                worker = module.get_worker_info()
                fetcher.fetch = times.timed(fetcher.fetch, worker.id if worker else 0)
            return fetcher

        module.DataLoader.__iter__ = observed_iter
        module._DatasetKind.create_fetcher = staticmethod(timed_create_fetcher)

    def _observation_of(self, loader: Any) -> Observation:
        """The observation of a loader, or of one like it that no longer exists: some scripts build one per epoch."""
        new = new_observation(loader, self.limits)
        for known in self.observations:
            owner = known.loader()
            if owner is loader and known.about["num_workers"] == new.about["num_workers"]:
                known.about = new.about
                return known
            if owner is None and known.about == new.about:
                known.loader = new.loader
                known.num_loaders += 1
                return known
        self.observations.append(new)
        return new


class AfterImport(MetaPathFinder):
    """A finder for `sys.meta_path` that calls `function` with the module `name` right after its import, once."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec and spec.loader:
            run_module = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run_module(module)
                self.function(module)

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
