"""Observes every `DataLoader` of this process, by its iterators.

This module does not import torch: a script may set environment variables before it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from vitmnist.diagnosis.observation import Limits, Observation, new_observation
from vitmnist.diagnosis.timeline import Timeline

MODULE, FASTAI = "torch.utils.data.dataloader", "fastai.data.load"
PASS = "pass_of_vitmnist"  # the attribute of an iterator


class Generated:
    """The iterator of a loader whose `__iter__` is a generator, with which its iterator of torch is not observed."""

    def __init__(self, loader: Any, iterate: Callable[[Any], Any]) -> None:
        self._batches = iterate(loader)

    def __iter__(self) -> Generated:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __del__(self) -> None:
        if "_batches" in vars(self):
            self._batches.close()


class Observer:
    """Times what the iterators of `DataLoader`s do in this process, as soon as torch is imported."""

    def __init__(self, limits: Limits) -> None:
        self.time = Timeline(limits)
        self.processes = 0
        """Python processes that the script has started, such as ranks, without workers; they are not observed."""
        self._process = os.getpid()
        for name, install in ((MODULE, self._install), (FASTAI, self._install_fastai)):
            if module := sys.modules.get(name):
                install(module)
            else:
                sys.meta_path.insert(0, AfterImport(name, install))
        self._count_processes()

    def _install(self, module: Any) -> None:
        """Observe the iterators of torch's loaders and, when they are defined, those of other libraries."""
        base: Any = getattr(module, "_BaseDataLoaderIter", None)
        if not base:
            return
        base.__del__ = getattr(base, "__del__", lambda iterator: None)
        kinds = [base]
        while kinds:
            kind = kinds.pop()
            self._observe(kind)
            kinds += kind.__subclasses__()

        def observe(kind: Any) -> None:  # Python 3.10 would not hand the class on to a bound method
            self._observe(kind)

        base.__init_subclass__ = classmethod(observe)

    def _install_fastai(self, module: Any) -> None:
        """Observe fastai's loader, whose iteration moves and transforms what an iterator of torch delivers."""
        iterate = module.DataLoader.__iter__
        module.DataLoader.__iter__ = lambda loader: Generated(loader, iterate)
        self._observe(Generated)

    def _observe(self, kind: Any) -> None:
        """Time what a class of iterators does itself, rather than a class that it inherits from."""
        timed = {"__init__": self._begin, "_reset": self._begin, "__next__": self._request, "__del__": self._drop}
        for name, wrapped in timed.items():
            if function := vars(kind).get(name):
                setattr(kind, name, wrapped(function))

    def _begin(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def begin(iterator: Any, loader: Any = None, *more: Any, **named: Any) -> None:
            # A worker or rank that was forked has no report.
            if self.time.is_waiting or os.getpid() != self._process or getattr(loader, "is_internal", False):
                function(iterator, loader, *more, **named)
                return
            if PASS in vars(iterator):  # persistent workers
                self.time.close(vars(iterator)[PASS])
            looked = perf_counter()
            new = self.time.begin(self._observation_of(loader), looked)
            self.time.call(new, partial(function, iterator, loader, *more, **named), is_restart=True)
            vars(iterator)[PASS] = new

        return begin

    def _request(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def request(iterator: Any) -> Any:
            one = vars(iterator).get(PASS)
            return (
                self.time.request(one, function, iterator) if one and not self.time.is_waiting else function(iterator)
            )

        return request

    def _drop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def drop(iterator: Any) -> None:
            """The loop may have left the epoch early; then its workers end now."""
            one = vars(iterator).get(PASS)
            if one and not self.time.is_waiting:
                self.time.drop(one, function, iterator)
            elif vars(iterator):  # otherwise --stop has prevented it
                function(iterator)

        return drop

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
                known.are_rebuilt &= known.num_loaders == 1 or loader not in known.loaders
                known.num_loaders += loader not in known.loaders
                known.loaders.add(loader)
                known.about, known.source = new.about, new.source
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
