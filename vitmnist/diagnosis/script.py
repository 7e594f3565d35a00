"""Runs a user's training script unchanged, observes its loaders, and reports where the time went.

    python -m vitmnist.diagnose train_mine.py --its --own arguments
    python -m vitmnist.diagnose --steps 100 --stop --json report.json -m package.train --its --own arguments

The options come before the script; everything after it belongs to the script.
"""

# Nothing here imports torch: the script may set environment variables before it does.

from __future__ import annotations

import argparse
import builtins
import io
import json
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
from vitmnist.diagnosis.script_report import describe_script, format_report
from vitmnist.runtime.files import write_atomic

OWN_FOLDER = str(Path(__file__).parent)
INTERRUPTED = 130  # what a shell shows after Ctrl-C


class MissingScriptError(Exception):
    """The file or module of the command line cannot be found or read."""


def main() -> None:
    """Run the script of the command line, print the report to stderr, and exit with the script's exit code."""
    parser, options = _parse()
    load, sys.argv = (_load_module, options.module) if options.module else (_load_script, options.script)
    command = shlex.join(["python", *sys.orig_argv[1:]])
    json_file = options.json and options.json.absolute()  # the script may change the working directory
    limits = Limits(options.steps, options.warm_up, options.stop)
    observations = Observer(limits).observations
    try:
        ended = _run(load)
    except MissingScriptError as error:
        parser.error(str(error))
    _join_threads()
    report = describe_script(observations, limits, command, _exit_code(ended))
    _print(format_report(report))
    failure = _fail_above(report, options.fail_above)
    if json_file:
        try:
            write_atomic(json_file, (json.dumps(report, indent=2) + "\n").encode())
        except OSError as error:
            failure = failure or f"error: {json_file}: {error.strerror}"
    if failure:
        _print(failure)
    if isinstance(ended, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it has been printed
        raise ended  # so that the process ends by SIGINT, as the shell expects
    sys.exit(report["exit_code"] or int(failure is not None))


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.diagnose",
        usage="%(prog)s [options] (SCRIPT.py | -m package.module) [arguments of the script ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each loader to observe (200)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not observed (10)")
    parser.add_argument("--stop", action="store_true", help="end the script when a loader's steps have been observed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--fail-above",
        type=float,
        metavar="PCT",
        help="exit with 1 if a loader makes the script wait for more than this percentage of the time",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if options.warm_up < 0:
        parser.error(f"--warm-up {options.warm_up}: must be at least 0")
    if options.fail_above is not None and not 0 <= options.fail_above <= 100:
        parser.error(f"--fail-above {options.fail_above:g}: must be from 0 to 100")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: the folder {options.json.parent} does not exist; create it first")
    return parser, options


def _run(load: Callable[[str], tuple[ModuleType, CodeType]]) -> BaseException | None:
    """Run the script as `__main__`, and return the exception that ended it.

    `__main__` stays in place: the script's threads and exit handlers may need it.
    """
    try:
        if not sys.argv:
            raise MissingScriptError("which script? Type SCRIPT.py or -m package.module after the options")
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
        threading._shutdown()  # type: ignore[attr-defined]


def _print(text: str) -> None:
    """Print to stderr as it was before the script, which may have replaced or closed `sys.stderr`."""
    with suppress(ValueError, OSError):
        print(text, file=sys.__stderr__)


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


def _fail_above(report: dict[str, Any], limit: float | None) -> str | None:
    """Why the exit code must be 1: the loaders that wait for more than `limit` percent of the time, or no figures."""
    if limit is None:
        return None
    if all(figures["waiting_pct"] is None for figures in report["loaders"]):
        return f"failed: nothing was measured to compare with --fail-above {limit:g}%"
    above = [
        f"{figures['where']} ({figures['waiting_pct']:.1f}%)"
        for figures in report["loaders"]
        if figures["waiting_pct"] is not None and figures["waiting_pct"] > limit
    ]
    return f"failed: waiting exceeds --fail-above {limit:g}%: {', '.join(above)}" if above else None
