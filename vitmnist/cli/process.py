"""The process of `train`: its connection to other ranks, its locks, and its message and exit code at the end."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vitmnist.cli.command import errors_as_messages, format_command
from vitmnist.cli.messages import classify_cli_error
from vitmnist.errors import ConfigError, PeerError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import folder_lock
from vitmnist.runtime.signals import StopSignal, end_interrupted, ignore_stop_signals, signal_handler
from vitmnist.runtime.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class ProcessState:
    """The state of this process while it starts and trains a run or sweep.

    `resources`, such as the lock of the output folder, are released at exit.
    """

    argv: list[str]
    world: World = SINGLE_PROCESS
    stop: StopSignal = field(default_factory=StopSignal)
    resources: ExitStack = field(default_factory=ExitStack)
    folder: Path | None = None
    resume_arguments: list[str] = field(default_factory=list)

    def lock_folder(self, folder: Path, key: str, resume_arguments: list[str], *, refuse_existing: bool) -> None:
        """Create the folder that `key` names, and lock it until the process exits.

        Raises:
            ConfigError: the folder cannot be created, is in use, or holds records although it must be new.
        """
        path = display_path(folder)
        try:
            self.resources.enter_context(folder_lock(folder))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; name another folder with {key}=FOLDER") from error
        if refuse_existing and any(any(folder.rglob(name)) for name in ("result.json", "checkpoints/*.pt")):
            raise ConfigError(
                f"{key}={path}: holds records already, which would be overwritten; name another folder, or resume "
                "with resume=auto"
            )
        self.folder, self.resume_arguments = folder, resume_arguments

    def resume_hint(self) -> str:
        """Format the folder of the results and the command that resumes, for the message about an interruption."""
        if self.folder is None:
            return ""
        results = f"; results: {display_path(self.folder)}"
        if not any(self.folder.glob("**/checkpoints/*.pt")):
            return results
        return f"{results}, resume with\n    {format_command(self.world.size)} {shlex.join(self.resume_arguments)}"


@contextmanager
def exit_with_message(process: ProcessState) -> Iterator[None]:
    """Turn an exception in the block into one message and an exit code, on the first rank that fails."""
    # Otherwise, the logging module prints a traceback for a closed pipe (`| head`).
    logging.raiseExceptions = False
    try:
        with (
            errors_as_messages(partial(_first_failure, process)),
            signal_handler(lambda *_: end_interrupted(process.resume_hint()), signal.SIGINT),
            process.resources,
        ):
            yield
    finally:
        # Unloading torch takes a second; a late signal must not change the exit code.
        atexit.register(ignore_stop_signals)
    process.world.disconnect()


def _first_failure(process: ProcessState, raised: BaseException) -> BaseException:
    """Return the error to report on this rank; exits if another rank or the log reports it."""
    error = process.world.first_failure(raised)
    failure = classify_cli_error(error)
    if failure.status == "interrupted":
        # Before Hydra configures the log, Python prints warnings to stderr.
        log.warning("%s%s", failure.message, process.resume_hint())
        sys.exit(failure.exit_code)
    if process.folder and (process.folder / "result.json").exists():
        log.info("failed; results: %s", display_path(process.folder))
    # The rank that failed shows its message, and rank 0 repeats it; the other ranks print nothing.
    if isinstance(error, PeerError) and not process.world.is_main:
        sys.exit(failure.exit_code)
    return error


def import_trainer() -> type[Trainer]:
    """Import `Trainer` and torch; this is done late because `--help` needs neither."""
    # A fork server, the default of Python 3.14 on Linux, imports torch once for all workers of a loader.
    multiprocessing.set_forkserver_preload(["__main__", "vitmnist.loaders.disk"])
    # During the imports, the garbage collector would scan the imported objects again and again.
    gc.disable()
    from vitmnist.trainer import Trainer

    # Scanning millions of imported objects takes 0.3 s in each job of a sweep, and longer when the process exits. The
    # first optimizer imports Triton, which must come later: it reports frozen objects as leaks.
    if not gc.get_freeze_count():
        gc.freeze()
    gc.enable()
    return Trainer
