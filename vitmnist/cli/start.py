"""One start of `train`: its ranks and signals, what it holds until it ends, and the one way in which it ends."""

from __future__ import annotations

import atexit
import gc
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vitmnist.cli.arguments import check_name
from vitmnist.cli.command import end
from vitmnist.cli.messages import describe
from vitmnist.errors import ConfigError, described
from vitmnist.runtime.failures import Failure
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import locked
from vitmnist.runtime.signals import StopSignal, end_interrupted, handled_by, ignore_stopping
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)

RECORDS = ("result.json", "checkpoints/*.pt")  # of a run


@dataclass
class Start:
    """The state of this process while it starts and trains a run or sweep.

    Args:
        typed: the command line.
        held: the lock of the folder and the like, released at the end.
        hint: the end of a message about an interruption: where the results are, and the command that resumes.
    """

    typed: list[str]
    world: World = SINGLE_PROCESS
    stop: StopSignal = field(default_factory=StopSignal)
    held: ExitStack = field(default_factory=ExitStack)
    hint: Callable[[], str] = str
    is_training: bool = False

    def hold(self, folder: Path, key: str, refused: tuple[str, ...] = ()) -> None:
        """Create the folder of a run or sweep, and lock it until the end.

        Args:
            key: by which it is named on the command line.
            refused: files of an earlier run or sweep that must not be there.

        Raises:
            ConfigError: it cannot be created, is in use, or holds records.
        """
        shown, advice = display_path(folder), f"name another folder with {key}=FOLDER"
        check_name(folder.absolute(), advice)
        try:
            self.held.enter_context(locked(folder))
        except OSError as error:
            raise ConfigError(f"{shown}: {error.strerror}{'' if folder.is_dir() else f'; {advice}'}") from error
        if any(any(folder.glob(pattern)) for pattern in refused):
            raise ConfigError(
                f"{key}={shown}: holds records already, which would be overwritten; name another folder, or resume "
                "with resume=auto"
            )


@contextmanager
def ending(start: Start) -> Iterator[None]:
    """Turn an exception in the block into one message and an exit code, on the first rank that fails."""
    logging.raiseExceptions = False  # a closed pipe (`| head`) must not print tracebacks of the logging module
    failed: BaseException | None = None
    try:
        with handled_by(lambda *_: end_interrupted(start.hint()), signal.SIGINT), start.held:
            yield
        sys.stdout.flush()
    except SystemExit as ended:
        if ended.code:
            raise
    except BaseException as raised:
        failed = raised
    finally:
        # Torch takes a second to leave; a signal in that time must not make a completed run look like a failed one.
        atexit.register(ignore_stopping)
    if failed:
        error = start.world.root_cause(failed)
        failure = describe(error, start.typed)
        if not failure.is_user_error and not start.is_training:  # by Hydra's grammar, or a sweeper
            failure = Failure(f"{described(error)} (HYDRA_FULL_ERROR=1 shows the traceback)")
        if failure.status == "interrupted":
            # Before Hydra has configured logging, this goes to stderr.
            log.warning("%s%s", failure.message, start.hint())
            sys.exit(failure.exit_code)
        if not start.world.report_failure(error, failure.message):
            sys.exit(failure.exit_code)
        end(error, failure)
    if start.world.is_main and not start.is_training:  # after --help, or nothing was left to do
        start.world.broadcast_object(lambda: None)
    start.world.disconnect()


def import_run() -> Callable[..., Result]:
    """Import `run`, and with it torch; not before, because `--help` needs neither."""
    gc.disable()  # it would scan the objects of an import again and again
    import torch

    from vitmnist.run import run

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler
    if not gc.get_freeze_count():  # a job of a sweep would examine millions of imported objects, which takes 0.3 s
        gc.freeze()
    gc.enable()
    return run
