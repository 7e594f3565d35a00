"""The command line: `vitmnist COMMAND …` or `python -m vitmnist COMMAND …`. `vitmnist KEY=VALUE …` trains.

This module imports neither torch nor Hydra, so that `--help` answers at once.
"""

import signal
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper

from vitmnist.errors import ExitCode, suggest_names
from vitmnist.runtime.signals import exit_interrupted, handle_signals

COMMANDS = {
    "train": "train a model; with -m a sweep, a run for each combination of values",
    "evaluate": "accuracy, metrics per class, confusion matrix and mistakes of a trained model",
    "predict": "classify image files with a trained model",
    "export": "write a trained model as ONNX or torch.export program",
    "report": "compare runs and sweeps: tables, chart, summary",
    "status": "list runs with their progress",
    "diagnose": "measure whether a training script waits for its data",
}
"""The commands and their descriptions. A command runs `main` of the module `vitmnist.cli.COMMAND`."""


def command_main(command: str) -> Callable[[], None]:
    """Import the function that runs a command; it reads its arguments from `sys.argv`."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # On Windows, the code page of a pipe lacks characters such as ≈.
    with handle_signals(lambda *_: exit_interrupted(), signal.SIGINT):
        main: Callable[[], None] = import_module(f"vitmnist.cli.{command}").main
        return main


def main() -> None:
    """Run the command that `sys.argv` names. KEY=VALUE arguments and options train; no argument lists the commands."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("", "-h", "--help"):
        print(_help())
    elif first in COMMANDS:
        del sys.argv[1]
        command_main(first)()
    elif not first.startswith(("-", "~")) and "=" not in first:
        print(f"error: {first}: there is no such command; {suggest_names(first, COMMANDS)}", file=sys.stderr)
        print("To train, set keys and groups as KEY=VALUE; --help explains more", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    else:
        command_main("train")()


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{meaning}" for name, meaning in COMMANDS.items())
    return f"""usage: vitmnist COMMAND …     run a command; COMMAND --help explains it
       vitmnist KEY=VALUE …    train, the same as vitmnist train and python train.py

commands:
{commands}

Training is for single-label classification of images of one size, held in memory, in a mapped file,
or read for each batch.
vitmnist train --help lists all groups and keys; --version prints the version."""


if __name__ == "__main__":
    main()
