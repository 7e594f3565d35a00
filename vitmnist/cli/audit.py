"""Checks loaders for repeated and missing samples, shared random numbers, leaks, …: a line for each promise.

    vitmnist audit mine.py
    vitmnist audit mine.py:build_train mine.py:build_eval

Each is a function that takes a dataset and returns a new loader over it; without a name it is `build`. The script is
imported, so what stands below `if __name__ == "__main__":` does not run. The exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from vitmnist.auditing.audit import audit
from vitmnist.cli.command import command
from vitmnist.errors import ConfigError, UserError, allowed_names


def _parse(parser: ArgumentParser) -> Namespace:
    parser.add_argument("factories", nargs="+", metavar="SCRIPT.py[:FUNCTION]", help="builds a loader over a dataset")
    parser.add_argument("--samples", type=int, default=1009, help="size of the dataset (1009)")
    return parser.parse_intermixed_args()


@command(_parse)
def main(options: Namespace) -> None:
    broken = []
    for typed in options.factories:
        factory = _factory(typed)
        print(f"{typed}:")
        if not audit(factory, samples=options.samples).ok:
            broken.append(typed)
    if broken:
        raise UserError(f"{', '.join(broken)}: breaks a promise; see the lines that say FAILED")


def _factory(typed: str) -> Callable[..., Any]:
    """The function that `SCRIPT.py:FUNCTION` names."""
    script, _, name = typed.partition(":")
    module = _import_script(Path(script))
    factory: Any = getattr(module, name or "build", None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{script}:{name or 'build'}: there is no such function; {allowed_names(name, functions)}")
    return factory  # type: ignore[no-any-return]


def _import_script(path: Path) -> ModuleType:
    """A script as a module, which its loaders' workers can import too."""
    path.stat()  # raises FileNotFoundError with its name
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: type the path of a Python file, as in mine.py or mine.py:FUNCTION")
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
