"""A parser for each command, and one way to end for every exception."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import NoReturn, TextIO

from vitmnist.errors import ExitCode, Failure, printable
from vitmnist.runtime.files import display_path

Main = Callable[[], None]


class PrintableFormatter(logging.Formatter):
    """The formatter of every log: escapes what could command a terminal, such as ESC in the name of a file."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        return printable(super().format(record))


def echo(text: str, file: TextIO | None = None) -> None:
    """Print a text that may have names of files or values of records in it, to stdout by default."""
    print(printable(text), file=file)


def command(name: str, parse: Callable[[ArgumentParser], Namespace]) -> Callable[[Callable[[Namespace], None]], Main]:
    """Turn a function into a command; its docstring, or else the docstring of its module, is the help.

    Args:
        parse: adds the arguments to the parser, parses the command line, and checks it.
    """

    def decorate(run: Callable[[Namespace], None]) -> Main:
        def main() -> None:
            description = cleandoc(run.__doc__ or sys.modules[run.__module__].__doc__ or "")
            formatter = RawDescriptionHelpFormatter
            parser = ArgumentParser(f"vitmnist {name}", description=description, formatter_class=formatter)
            # This handler prints warnings while no log is configured.
            if logging.lastResort:
                logging.lastResort.setFormatter(PrintableFormatter())
            try:
                run(parse(parser))
                # A closed pipe is an error here, not at the end of the interpreter. A closed stdout is None.
                print(end="", flush=True)
            except (Exception, KeyboardInterrupt) as error:
                end(error)

        return main

    return decorate


def end(error: BaseException, failure: Failure | None = None) -> NoReturn:
    """Exit with one message; with a traceback if the program is at fault, or with `HYDRA_FULL_ERROR=1`.

    Args:
        failure: how the exception is reported; None: as `describe` says.
    """
    # The reader of stdout has gone, as `| head` does. The interpreter must not fail when it flushes stdout at its end.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(ExitCode.PIPE_CLOSED)
    if failure is None:
        # This imports Hydra.
        from vitmnist.cli.messages import describe

        failure = describe(error)
    if failure.status == "interrupted":
        print(failure.message, file=sys.stderr)
    elif failure.is_user_error and os.environ.get("HYDRA_FULL_ERROR") != "1":
        echo(f"error: {failure.message}", sys.stderr)
    else:
        traceback.print_exception(error)
    sys.exit(failure.exit_code)


def program(ranks: int = 1) -> str:
    """`vitmnist`, `python -m vitmnist` or `python train.py`, as it was started; with several ranks by torchrun."""
    script = Path(sys.argv[0])
    started = f"torchrun --nproc-per-node={ranks}" if ranks > 1 else "python"
    if script.suffix == ".py" and script.name != "__main__.py":
        return f"{started} {display_path(script)}"
    return f"{started} -m vitmnist" if ranks > 1 or script.suffix == ".py" else script.name
