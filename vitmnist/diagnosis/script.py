"""Runs a user's training script unchanged and observes its loaders."""

# Nothing here imports torch: the script may set environment variables before it does.

from __future__ import annotations

import builtins
import io
import os
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from vitmnist.diagnosis.observation import Limits
from vitmnist.diagnosis.observer import Observer
from vitmnist.diagnosis.script_report import describe_script
from vitmnist.errors import DataError
from vitmnist.runtime.cpu import CpuTime

OWN_FOLDER = str(Path(__file__).parent)
INTERRUPTED = 130  # what a shell shows after Ctrl-C


class MissingScriptError(DataError):
    """The file or module of the command line cannot be found or read."""


def observe_script(
    arguments: list[str], is_module: bool, limits: Limits
) -> tuple[dict[str, Any], BaseException | None]:
    """Run a script or module with its arguments as `__main__`, and describe its loaders.

    Returns:
        The report, and the exception that ended the script.

    Raises:
        MissingScriptError: there is no such script.
    """
    sys.argv = arguments
    observer = Observer(limits)
    ended = _run(_load_module if is_module else _load_script)
    at_end = CpuTime.now()
    _join_threads()
    observer.time.end(None if observer.time.is_threaded else at_end)
    return describe_script(observer, shlex.join(_command_line()), _exit_code(ended)), ended


def _command_line() -> list[str]:
    """The command that runs now, as it was typed."""
    program, *arguments = sys.orig_argv[1:]
    return ["vitmnist", *arguments] if Path(program).name == "vitmnist" else ["python", program, *arguments]


def _run(load: Callable[[str], tuple[ModuleType, CodeType]]) -> BaseException | None:
    """Run the script as `__main__`, and return the exception that ended it.

    `__main__` stays in place: the script's threads and exit handlers may need it.
    """
    try:
        sys.modules["__main__"], code = load(sys.argv[0])
        exec(code, sys.modules["__main__"].__dict__)
    except MissingScriptError:
        raise
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            with suppress(ValueError):  # the script may have closed stderr
                print(error.code, file=sys.stderr)
        return error
    except BaseException as error:
        _remove_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return error
    return None


def _join_threads() -> None:
    """Wait for the script's threads, which may still train.

    The interpreter calls the same function before it exits. To join each thread would wait for ever for those of a
    ThreadPoolExecutor, which only this function ends.
    """
    with suppress(KeyboardInterrupt):  # the report then comes without the rest
        getattr(threading, "_shutdown", lambda: None)()


def _load_script(name: str) -> tuple[ModuleType, CodeType]:
    """`__main__` and the code as of `python NAME`."""
    path = os.path.abspath(name)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise MissingScriptError(f"{name}: {error.strerror}; type the path of a Python file") from error
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    code = compile(source, path, "exec", dont_inherit=True)  # without the __future__ imports of this file
    return _main_module(__file__=path, __loader__=SourceFileLoader("__main__", path)), code


def _load_module(name: str) -> tuple[ModuleType, CodeType]:
    """`__main__` and the code as of `python -m NAME`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # the console script has its own folder here
    try:
        spec = find_spec(name)
        if spec and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a package that its __init__.py imports
            raise
        spec = None
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if not spec or not code:
        raise MissingScriptError(f"-m {name}: there is no such module, or package with a __main__.py, in {sys.path[0]}")
    sys.argv[0] = spec.origin or name
    return _main_module(__file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec), code


def _main_module(**attributes: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, **attributes)
    return module


def _remove_own_frames(error: BaseException) -> None:
    """Make the tracebacks of an exception, and of those that it followed, those of the script alone."""
    chain = [error]
    for one in chain:
        frames, traceback = [], one.__traceback__
        while traceback:
            if not traceback.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
                frames.append(traceback)
            traceback = traceback.tb_next
        one.__traceback__ = frames[0] if frames else None
        for frame, following in zip_longest(frames, frames[1:]):
            frame.tb_next = following
        for other in (one.__cause__, one.__context__):
            if other is not None and all(other is not known for known in chain):
                chain.append(other)


def _exit_code(ended: BaseException | None) -> int:
    """The exit code of a process that is ended by this exception."""
    if isinstance(ended, KeyboardInterrupt):
        return INTERRUPTED
    code = ended.code if isinstance(ended, SystemExit) else int(ended is not None)
    return code & 0xFF if isinstance(code, int) else int(code is not None)
