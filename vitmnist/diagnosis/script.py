"""Runs a user's training script unchanged and observes its loaders."""

# Nothing here imports torch: the script may set environment variables before it does.

from __future__ import annotations

import builtins
import os
import runpy
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from vitmnist.diagnosis.observation import Limits
from vitmnist.diagnosis.observer import Observer
from vitmnist.diagnosis.report import Report, describe_script
from vitmnist.errors import DataError, ExitCode


class MissingScriptError(DataError):
    """The file or module of the command line cannot be found or read."""


def observe_script(arguments: list[str], is_module: bool, limits: Limits) -> tuple[Report, BaseException | None]:
    """Run a script or module with its arguments as `__main__`, and describe its loaders.

    Returns:
        The report, and the exception that ended the script.

    Raises:
        MissingScriptError: there is no such script.
    """
    sys.argv = arguments
    observer = Observer(limits)
    ended = _run(is_module)
    observer.end()
    return describe_script(observer, _exit_code(ended)), ended


def _run(is_module: bool) -> BaseException | None:
    """Run the script of the command line as `__main__`, and return the exception that ended it."""
    name = sys.argv[0]
    if is_module:
        _set_import_folder(os.getcwd())
        if not _is_module(name):
            raise MissingScriptError(f"-m {name}: there is no such module, or package with a __main__.py")
    elif not os.path.isfile(name):
        raise MissingScriptError(f"{name}: there is no such file; type the path of a Python file")
    else:
        _set_import_folder(os.path.dirname(os.path.realpath(name)))
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_script(os.path.abspath(name))
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            with suppress(ValueError):  # the script may have closed stderr
                print(error.code, file=sys.stderr)
        return error
    except BaseException as error:
        traceback = error.__traceback__
        while traceback and traceback.tb_frame.f_code.co_filename in (__file__, runpy.run_module.__code__.co_filename):
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return error
    return None


def _run_script(path: str) -> None:
    """As `runpy.run_path`, but `__main__` stays in place: the script's threads and exit handlers may need it."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _set_import_folder(folder: str) -> None:
    """Put `folder` first in the import path, in place of the folder of vitmnist's own script."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _is_module(name: str) -> bool:
    try:
        spec = find_spec(name)
        return spec is not None and (spec.submodule_search_locations is None or bool(find_spec(f"{name}.__main__")))
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return False
        raise  # a missing package that its __init__.py imports


def _exit_code(ended: BaseException | None) -> int:
    """The exit code of a process that is ended by this exception."""
    if isinstance(ended, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    code = ended.code if isinstance(ended, SystemExit) else int(ended is not None)
    return code & 0xFF if isinstance(code, int) else int(code is not None)
