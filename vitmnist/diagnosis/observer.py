"""Measures every `DataLoader` of this process from within its iterator: waiting, step, and the time to make a batch.

This module does not import torch: a script may set environment variables before it does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from vitmnist.diagnosis.after_import import AfterImport
from vitmnist.diagnosis.observation import Limits, Observation, new_observation


class StopScript(SystemExit):
    """Ends the script after the observed steps; its `finally` blocks run."""


class ObservedIterator:
    """The iterator of a `DataLoader`, with three readings of the clock per batch until its observation is complete."""

    def __init__(self, iterator: Iterator[Any], observation: Observation, start_s: float) -> None:
        self._iterator = iterator
        self._observation = observation
        self._start_s = start_s  # of the workers; part of the wait for the first batch
        self._is_first = True
        self._waiting_s: float | None = None  # of the batch that the script has now
        self._arrived = 0.0

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __next__(self) -> Any:
        observation = self._observation
        if observation.is_complete:
            return next(self._iterator)
        asked = perf_counter()
        if self._waiting_s is not None:
            self._end_step(self._waiting_s, asked - self._arrived)
        started = perf_counter()
        batch = next(self._iterator)
        self._arrived = perf_counter()
        self._waiting_s = self._arrived - started
        observation.requests += 1
        observation.overhead_s += started - asked
        return batch

    def _end_step(self, waiting_s: float, step_s: float) -> None:
        observation = self._observation
        if self._is_first:
            observation.add_first_step(self._start_s + waiting_s)
        else:
            observation.add_step(waiting_s, step_s)
        self._is_first, self._waiting_s = False, None
        # In another thread, SystemExit would end that thread alone, and the script could wait for it for ever.
        is_main = threading.current_thread() is threading.main_thread()
        if observation.is_complete and observation.limits.stop and is_main:
            raise StopScript(0)


class Observer:
    """Replaces `DataLoader.__iter__` in this process, as soon as the script imports torch."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.observations: list[Observation] = []
        self._process = os.getpid()
        self._starting = threading.local()  # `fetch_times` of the loader whose iterator this thread creates
        sys.meta_path.insert(0, AfterImport("torch.utils.data.dataloader", self._install))

    def _install(self, module: Any) -> None:
        iterate, create_fetcher = module.DataLoader.__iter__, module._DatasetKind.create_fetcher

        def observed_iter(loader: Any) -> Any:
            # A worker or rank that was forked has no report.
            if os.getpid() != self._process or getattr(loader, "is_internal", False):
                return iterate(loader)
            observation = self._observation_of(loader)
            if observation.is_complete:
                return iterate(loader)
            self._starting.fetch_times = observation.fetch_times
            started = perf_counter()
            try:
                iterator = iterate(loader)
            finally:
                self._starting.fetch_times = None
            return ObservedIterator(iterator, observation, perf_counter() - started)

        def timed_create_fetcher(*arguments: Any) -> Any:
            """Also called in each worker, which is forked while `fetch_times` is set."""
            fetcher = create_fetcher(*arguments)
            if times := getattr(self._starting, "fetch_times", None):
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
            is_same = owner is loader or (owner is None and known.where == new.where)
            if is_same and known.settings == new.settings:
                known.loader, known.where = new.loader, new.where
                return known
        self.observations.append(new)
        return new
