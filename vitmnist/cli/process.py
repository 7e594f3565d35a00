"""A `train` process from its start to its end: what it holds meanwhile, and one message and exit code at the end."""

from __future__ import annotations

import atexit
import gc
import logging
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitmnist.cli.command import end, program
from vitmnist.cli.messages import describe
from vitmnist.errors import ConfigError, PeerError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import folder_lock
from vitmnist.runtime.signals import StopSignal, end_interrupted, handled_by, ignore_stopping
from vitmnist.runtime.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class TrainingProcess:
    """The state of this process while it starts and trains a run or sweep.

    Args:
        typed: the command line.
        resources: what is released at the end, such as the lock of the folder.
        folder: the output folder of the run or sweep, once it is locked.
        resume_with: the arguments that resume the run or sweep.
    """

    typed: list[str]
    world: World = SINGLE_PROCESS
    stop: StopSignal = field(default_factory=StopSignal)
    resources: ExitStack = field(default_factory=ExitStack)
    folder: Path | None = None
    resume_with: list[str] = field(default_factory=list)
    is_training: bool = False

    def lock_folder(self, folder: Path, key: str, resume_with: list[str], *, must_be_new: bool) -> None:
        """Create the folder of a run or sweep, and lock it until the end.

        Args:
            key: the key that names it on the command line.
            resume_with: the arguments that resume what begins here.
            must_be_new: refuse a folder in which an earlier run or sweep has left records.

        Raises:
            ConfigError: it cannot be created, is in use, or holds records.
        """
        shown = display_path(folder)
        try:
            self.resources.enter_context(folder_lock(folder))
        except OSError as error:
            raise ConfigError(f"{shown}: {error.strerror}; name another folder with {key}=FOLDER") from error
        # The jobs of a sweep lie below its folder; runs that lie below the folder of another run are not in its way.
        below = "**/" if key == "hydra.sweep.dir" else ""
        if must_be_new and any(any(folder.glob(below + name)) for name in ("result.json", "checkpoints/*.pt")):
            raise ConfigError(
                f"{key}={shown}: holds records already, which would be overwritten; name another folder, or resume "
                "with resume=auto"
            )
        self.folder, self.resume_with = folder, resume_with

    def hint(self) -> str:
        """The end of a message about an interruption: where the results are, and the command that resumes."""
        if self.folder is None:
            return ""
        results = f"; results: {display_path(self.folder)}"
        if not any(self.folder.glob("**/checkpoints/*.pt")):
            return results
        return f"{results}, resume with\n    {program(self.world.size)} {shlex.join(self.resume_with)}"


@contextmanager
def exit_with_message(process: TrainingProcess) -> Iterator[None]:
    """Turn an exception in the block into one message and an exit code, on the first rank that fails."""
    # The logging module would print a traceback for a closed pipe (`| head`).
    logging.raiseExceptions = False
    try:
        with handled_by(lambda *_: end_interrupted(process.hint()), signal.SIGINT), process.resources:
            yield
        # A closed pipe is an error here, not at the end of the interpreter.
        print(end="", flush=True)
    except SystemExit:
        raise
    except BaseException as error:
        _exit(process, process.world.first_failure(error))
    finally:
        # Torch takes a second to leave; a signal in that time must not make a completed run look like a failed one.
        atexit.register(ignore_stopping)
    process.world.disconnect()


def _exit(process: TrainingProcess, error: BaseException) -> None:
    failure = describe(error, process.typed)
    if failure.status == "interrupted":
        # Before Hydra has configured the log, Python prints a warning to stderr.
        log.warning("%s%s", failure.message, process.hint())
        sys.exit(failure.exit_code)
    if process.is_training and process.folder and (process.folder / "result.json").exists():
        log.info("failed; results: %s", display_path(process.folder))
    # Before training, such an exception is one of Hydra's grammar or of a sweeper, about what was typed.
    if not process.is_training and not failure.is_user_error:
        message = f"{failure.message} (HYDRA_FULL_ERROR=1 shows the traceback)"
        failure = replace(failure, message=message, is_user_error=True)
    # The rank that failed shows its message, and rank 0 repeats it; the other ranks are silent.
    if isinstance(error, PeerError) and not process.world.is_main:
        sys.exit(failure.exit_code)
    end(error, failure)


def import_trainer() -> type[Trainer]:
    """Import `Trainer`, and with it torch; not before, because `--help` needs neither."""
    # The garbage collector would scan the imported objects again and again.
    gc.disable()
    import torch

    from vitmnist.trainer import Trainer

    # The first optimizer imports torch's compiler.
    torch.optim.SGD([torch.zeros(1)])
    # Each job of a sweep collects garbage, and would spend 0.3 s on millions of imported objects.
    if not gc.get_freeze_count():
        gc.freeze()
    gc.enable()
    return Trainer
