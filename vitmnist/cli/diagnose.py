"""Runs a training script unchanged, observes its loaders, and reports where the time went.

    vitmnist diagnose train_mine.py --its --own arguments
    vitmnist diagnose --steps 100 --stop --json report.json -m package.train --its --own arguments

The options come before the script; everything after it belongs to the script.
"""

# Nothing here imports torch: the script may set environment variables before it does.

from __future__ import annotations

import json
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from vitmnist.cli.command import EndedBySignal, command
from vitmnist.diagnosis.observation import Limits
from vitmnist.diagnosis.report import format_report, why_failed
from vitmnist.diagnosis.script import observe_script
from vitmnist.runtime.files import write_output

OPTIONS = ("--steps", "--warm-up", "--stop", "--json", "--fail-above")


def _parse(parser: ArgumentParser) -> Namespace:
    parser.usage = "%(prog)s [options] (SCRIPT.py | -m package.module) [arguments of the script ...]"
    parser.allow_abbrev = False
    steps = "batches of a loader to observe (up to the end of the script; with --stop 200)"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--warm-up", type=int, default=10, help="batches before that (10)")
    parser.add_argument("--stop", action="store_true", help="end the script when they have been observed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    limit = "exit with 1 if the script waits for its loaders for more than this percentage of the time"
    parser.add_argument("--fail-above", type=float, metavar="PCT", help=limit)
    parser.add_argument("-m", dest="module", nargs=REMAINDER, help="run a module, as python -m does")
    parser.add_argument("script", nargs=REMAINDER, help="the script and its arguments")
    options = parser.parse_args()
    if options.steps is None and options.stop:
        options.steps = 200
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if options.warm_up < 0:
        parser.error(f"--warm-up {options.warm_up}: must be at least 0")
    if options.fail_above is not None and not 0 <= options.fail_above <= 100:
        parser.error(f"--fail-above {options.fail_above:g}: must be from 0 to 100")
    if not (options.module or options.script):
        parser.error("which script? Type SCRIPT.py or -m package.module after the options")
    return options


@command("diagnose", _parse)
def main(options: Namespace) -> None:
    json_file: Path | None = options.json and options.json.absolute()  # the script may change the working directory
    if options.json:
        options.json.parent.stat()  # raises if there is none, before the script runs
    limits = Limits(options.steps, options.warm_up, options.stop)
    report, ended = observe_script(options.module or options.script, bool(options.module), limits)
    _print(format_report(report))
    failure = None if options.fail_above is None else why_failed(report, options.fail_above)
    if failure:
        _print(failure)
    script, *arguments = options.module or options.script
    if misplaced := [one for one in arguments if one.partition("=")[0] in OPTIONS]:
        _print(f"hint: {misplaced[0]} after {script} is an argument of the script; options of diagnose come before it")
    if json_file:
        json_file = json_file if report.rank is None else json_file.with_stem(f"{json_file.stem}-rank{report.rank}")
        write_output(json_file, (json.dumps(asdict(report), indent=2) + "\n").encode())
    if isinstance(ended, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it has been printed
        raise EndedBySignal
    sys.exit(report.exit_code or int(failure is not None))


def _print(text: str) -> None:
    """Print to stderr as it was before the script, which may have replaced or closed `sys.stderr`."""
    with suppress(ValueError, OSError):
        print(text, file=sys.__stderr__)
