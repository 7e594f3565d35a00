"""A parser for each command, and one way to end for every exception."""

import logging
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import NoReturn, TextIO

from vitmnist.errors import ExitCode, printable
from vitmnist.runtime.files import display_path


class PrintableFormatter(logging.Formatter):
    """The formatter of every log: escapes control characters, such as ESC in a file name."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def echo(text: str, file: TextIO | None = None) -> None:
    """Print text that may contain file names or recorded values, to stdout by default."""
    print(printable(text), file=file)


def command(
    name: str, parse: Callable[[ArgumentParser], Namespace]
) -> Callable[[Callable[[Namespace], None]], Callable[[], None]]:
    """Decorator that turns a function of parsed arguments into a command; its docstring or its module's is the help."""

    def decorate(run: Callable[[Namespace], None]) -> Callable[[], None]:
        def main() -> None:
            text = cleandoc(run.__doc__ or sys.modules[run.__module__].__doc__ or "")
            parser = ArgumentParser(f"vitmnist {name}", description=text, formatter_class=RawDescriptionHelpFormatter)
            # This handler prints warnings while no log is configured.
            if logging.lastResort:
                logging.lastResort.setFormatter(PrintableFormatter())
            try:
                run(parse(parser))
                # Raise the error of a closed pipe here, not at interpreter exit. `print` accepts that stdout is None.
                print(end="", flush=True)
            except (Exception, KeyboardInterrupt) as error:
                exit_with_error(error)

        return main

    return decorate


def exit_with_error(error: BaseException) -> NoReturn:
    """Exit with one message; with a traceback if the program is at fault, or with `HYDRA_FULL_ERROR=1`."""
    if isinstance(error, BrokenPipeError):
        # The reader of stdout, such as `head`, has ended. At interpreter exit, flushing stdout must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(ExitCode.PIPE_CLOSED)
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


def launch_command(ranks: int = 1) -> str:
    """The command that starts this program in some processes, such as `vitmnist` or `torchrun … train.py`."""
    script = Path(sys.argv[0])
    is_script = script.suffix == ".py" and script.name != "__main__.py"
    if ranks == 1 and script.suffix != ".py":
        return script.name
    launcher = "python"
    if ranks > 1:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        nodes = f"--nnodes={ranks // ranks_per_node} " if ranks > ranks_per_node else ""
        launcher = f"torchrun {nodes}--nproc-per-node={ranks_per_node}"
    return f"{launcher} {display_path(script) if is_script else '-m vitmnist'}"
