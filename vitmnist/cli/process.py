"""The process of `train`: connecting the ranks, and messages at the end.

docs/architecture.md has the order in which the handlers of an exception are called.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.cli.messages import classify_cli_error
from vitmnist.errors import ConfigError, PeerError, RunInterrupted
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import CHECKPOINTS, has_records
from vitmnist.runtime.signals import exit_interrupted, handle_signals
from vitmnist.runtime.world import SINGLE_PROCESS, World, is_distributed

log = logging.getLogger(__name__)


@contextmanager
def connected_ranks() -> Iterator[World]:
    """Connect the ranks of a run. An exception in the block is raised on the rank that failed first, and on rank 0.

    The other ranks exit with the exit code of the failure.
    """
    # Otherwise, the logging module prints a traceback for a closed pipe (`| head`).
    logging.raiseExceptions = False
    world = SINGLE_PROCESS
    try:
        with handle_signals(lambda *_: exit_interrupted(), signal.SIGINT):
            if is_distributed():
                from vitmnist.runtime.torch_world import TorchWorld  # Import late: this module imports torch.

                world = TorchWorld()
            yield world
    except (Exception, KeyboardInterrupt, RunInterrupted) as raised:
        error = world.find_first_failure(raised)
        failure = classify_cli_error(error)
        if failure.status == "interrupted":
            log.warning("%s", failure.message)
            sys.exit(failure.exit_code)
        if isinstance(error, PeerError) and not world.is_main:
            sys.exit(failure.exit_code)
        if error is raised:
            raise
        raise error from raised
    world.disconnect()


@contextmanager
def add_resume_hint(folder: Path, command: str) -> Iterator[None]:
    """Add the folder of the results, and the command that resumes, to the message of an interruption in the block."""
    try:
        with handle_signals(lambda *_: exit_interrupted(resume_hint(folder, command)), signal.SIGINT):
            yield
    except (KeyboardInterrupt, RunInterrupted) as error:
        raise type(error)(f"{str(error) or 'interrupted'}{resume_hint(folder, command)}") from error
    except Exception as error:
        if (folder / "result.json").exists() and not isinstance(error, ConfigError):
            log.info("failed; results: %s", display_path(folder))
        raise


def resume_hint(folder: Path, command: str) -> str:
    """Format the folder of the results, if there are any, and if there is a checkpoint, the command that resumes."""
    if not has_records(folder):
        return ""
    results = f"; results: {display_path(folder)}"
    return f"{results}, resume with\n    {command}" if any(folder.rglob(CHECKPOINTS)) else results
