"""Runs a function right after a module has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """A finder for `sys.meta_path` that calls `function` with the module `name`, once."""

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
