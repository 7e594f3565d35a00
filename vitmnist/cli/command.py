"""The argument parser and the exception handling that all commands share."""

import os
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.errors import ExitCode, escape_unprintable
from vitmnist.runtime.files import display_path

TIMED_FORMAT = "%(asctime)s  %(message)s"
"""The format of log records, as in conf/config.yaml."""


def create_parser(name: str, description: str | None) -> ArgumentParser:
    """Create the parser of a command; its description is shown without reformatting."""
    return ArgumentParser(f"vitmnist {name}", description=description, formatter_class=RawDescriptionHelpFormatter)


def add_run_arguments(parser: ArgumentParser, *, overrides: bool = False, device: bool = False) -> None:
    """Add the arguments that `evaluate`, `predict` and `export` share."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--weights", help="best, final or last (default: the first of these that exists)")
    if overrides:
        help_text = "overrides of the run's configuration, such as data.dataset.path=other"
        parser.add_argument("overrides", nargs="*", help=help_text)
    if device:
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn an exception of a command into one message and an exit code; a decorator of `main`.

    A traceback is also printed for a bug of the program, or with `HYDRA_FULL_ERROR=1`.
    """
    try:
        yield
        # Flush now, so that a closed pipe raises here and not at interpreter exit. `print` works even without a stdout.
        print(end="", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of stdout, such as `head`, has exited. Redirect stdout, so that the flush at exit succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(ExitCode.PIPE_CLOSED)
        # Import late: this module imports Hydra.
        from vitmnist.cli.messages import classify_cli_error

        failure = classify_cli_error(error)
        if failure.status == "interrupted":
            print(failure.message, file=sys.stderr)
        elif failure.is_user_error and os.environ.get("HYDRA_FULL_ERROR") != "1":
            print(f"error: {escape_unprintable(failure.message)}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.exit(failure.exit_code)


def format_command(ranks: int = 1) -> str:
    """Format the command that starts this program, such as `vitmnist` or, for several ranks, `torchrun … train.py`."""
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
