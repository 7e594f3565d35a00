"""Observes every `DataLoader` of this process, from within its iterator.

This module does not import torch: a script may set environment variables before it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from vitmnist.diagnosis.observation import Limits, Observation, Timeline, new_observation

MODULE = "torch.utils.data.dataloader"


class ObservedIterator:
    """The iterator of a `DataLoader`, whose requests are timed."""

    def __init__(
        self, start: Callable[[Any], Iterator[Any]], loader: Any, observed: Observation, time: Timeline
    ) -> None:
        self._observed, self._time = observed, time
        self._is_first = True
        self._iterator = time.wait(observed, start, loader, is_restart=True)
        observed.epochs += 1
        observed.is_iterated = True

    def __iter__(self) -> ObservedIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # it could not be created
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __next__(self) -> Any:
        is_first, self._is_first = self._is_first, False
        try:
            batch = self._time.wait(self._observed, next, self._iterator, is_restart=is_first)
        except StopIteration:
            self._observed.is_iterated = False
            raise
        self._time.add_batch(self._observed)
        return batch

    def __del__(self) -> None:
        """The loop may have left the epoch early; then its workers end now."""
        self._observed.is_iterated = False
        if "_iterator" in self.__dict__ and self._time.is_open and not self._time.is_complete:
            self._time.wait(self._observed, self.__delattr__, "_iterator", is_restart=True)


class Observer:
    """Replaces `DataLoader.__iter__` in this process, as soon as torch is imported."""

    def __init__(self, limits: Limits) -> None:
        self.time = Timeline(limits)
        self.processes = 0
        """Python processes that the script has started, such as ranks, without workers; they are not observed."""
        self._process = os.getpid()
        if module := sys.modules.get(MODULE):
            self._install(module)
        else:
            sys.meta_path.insert(0, AfterImport(MODULE, self._install))
        self._count_processes()

    def _install(self, module: Any) -> None:
        iterate = module.DataLoader.__iter__

        def observed_iter(loader: Any) -> Any:
            # A worker or rank that was forked has no report.
            if os.getpid() != self._process or getattr(loader, "is_internal", False):
                return iterate(loader)
            return ObservedIterator(iterate, loader, self._observation_of(loader), self.time)

        module.DataLoader.__iter__ = observed_iter

    def _count_processes(self) -> None:
        start, run = BaseProcess.start, subprocess.Popen.__init__

        def counted_start(process: Any) -> None:
            start(process)
            self.processes += not process.daemon  # as workers are

        def counted_run(process: Any, args: Any, *more: Any, **named: Any) -> None:
            run(process, args, *more, **named)
            program, *others = [args] if isinstance(args, str | bytes | os.PathLike) else list(args) or [""]
            is_compiler = any("_inductor" in str(one) for one in others)  # of torch.compile
            self.processes += Path(os.fsdecode(program)).name.startswith("python") and not is_compiler

        BaseProcess.start = counted_start  # type: ignore[method-assign, assignment]
        subprocess.Popen.__init__ = counted_run  # type: ignore[method-assign, assignment]

    def _observation_of(self, loader: Any) -> Observation:
        """The observation of a loader, or of one like it in turn: some scripts build one per epoch."""
        new = new_observation(loader)
        for known in self.time.observations:
            is_same = loader in known.loaders and known.about["num_workers"] == new.about["num_workers"]
            if is_same or (known.about == new.about and not known.is_iterated):
                known.num_loaders += loader not in known.loaders
                known.loaders.add(loader)
                known.about, known.samples = new.about, new.samples
                return known
        self.time.observations.append(new)
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
