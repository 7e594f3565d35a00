"""Runs a training script unchanged, observes its loaders, and reports where the time went.

    vitmnist diagnose train_mine.py --its --own arguments
    vitmnist diagnose --steps 100 --stop --json report.json -m package.train --its --own arguments

The options come before the script; everything after it belongs to the script.
"""

# This module does not import torch, because the script can set environment variables before it imports torch.

import builtins
import json
import os
import runpy
import sys
from argparse import REMAINDER, Namespace
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from vitmnist.cli.command import create_parser, errors_as_messages
from vitmnist.diagnosis.observer import Observer
from vitmnist.diagnosis.script_report import describe_script, format_report
from vitmnist.errors import DataError, ExitCode


def _parse() -> Namespace:
    parser = create_parser("diagnose", __doc__)
    parser.usage = "%(prog)s [options] (SCRIPT.py | -m package.module) [arguments of the script ...]"
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=int, help="batches to observe per loader (default: all; 200 with --stop)")
    parser.add_argument("--warm-up", type=int, default=10, help="batches to skip before that (default: 10)")
    parser.add_argument("--stop", action="store_true", help="end the script after these batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("-m", dest="module", nargs=REMAINDER, help="run a module, as python -m does")
    parser.add_argument("script", nargs=REMAINDER, help="the script and its arguments")
    options = parser.parse_args()
    if options.steps is None and options.stop:
        options.steps = 200
    if not (options.module or options.script):
        parser.error("no script; pass SCRIPT.py or -m package.module after the options")
    return options


@errors_as_messages()
def main() -> None:
    options = _parse()
    json_file: Path | None = options.json and options.json.absolute()  # The script can change the working directory.
    if json_file:
        options.json.parent.stat()  # If the folder is missing, raise before the script runs.
    sys.argv = options.module or options.script
    observer = Observer(options.steps, options.warm_up, options.stop)
    exit_code = _run(bool(options.module))
    if os.getpid() != observer.process_id:  # This process was forked by the script.
        sys.exit(exit_code)
    observer.end()
    report = describe_script(observer, exit_code)
    print(format_report(report), file=sys.__stderr__)
    if json_file:
        json_file = json_file if report.rank is None else json_file.with_stem(f"{json_file.stem}-rank{report.rank}")
        json_file.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    sys.exit(exit_code)


def _run(is_module: bool) -> int:
    """Run the script as `__main__`, and return its exit code."""
    name = sys.argv[0]
    # As in Python, the import path begins with the working directory (-m) or the folder of the script.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    try:
        exists = find_spec(name) is not None if is_module else os.path.isfile(name)
    except ModuleNotFoundError as error:  # `find_spec` imports the parent packages.
        raise DataError(f"-m {name}: {error}") from error
    if not exists:
        raise DataError(f"{name}: there is no such {'module' if is_module else 'Python file'}")
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            # `runpy.run_path` would remove `__main__`, which threads and exit handlers of the script can need.
            path = os.path.abspath(name)
            sys.modules["__main__"] = script = ModuleType("__main__")
            script.__dict__.update(__file__=path, __builtins__=builtins)
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), script.__dict__)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback = error.__traceback__
        while traceback and traceback.tb_frame.f_code.co_filename in (__file__, runpy.run_module.__code__.co_filename):
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0
