"""The lifecycle of a `train` process: ranks, signals, locks, exit.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process, and broadcasts its arguments,
its folder and its configuration; the other ranks log to `rank-N.log` there.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmnist.cli.arguments import AUTO_FORM, key_of, value_of, without_keys
from vitmnist.cli.command import end
from vitmnist.cli.messages import describe
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import to_plain_dict
from vitmnist.errors import ConfigError, PeerError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import locked
from vitmnist.runtime.signals import StopSignal, end_interrupted, handled_by, ignore_stopping
from vitmnist.runtime.world import SINGLE_PROCESS, World, launched

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)

RECORDS = ("result.json", "checkpoints/*.pt")  # of a run


@dataclass
class Start:
    """The state of this process while it starts and trains a run or sweep.

    Args:
        typed: the command line.
        resources: the lock of the folder and the like, released at the end.
        hint: the end of a message about an interruption: where the results are, and the command that resumes.
    """

    typed: list[str]
    world: World = SINGLE_PROCESS
    stop: StopSignal = field(default_factory=StopSignal)
    resources: ExitStack = field(default_factory=ExitStack)
    hint: Callable[[], str] = str
    is_training: bool = False

    def lock_folder(self, folder: Path, key: str, refused: tuple[str, ...] = ()) -> None:
        """Create the folder of a run or sweep, and lock it until the end.

        Args:
            key: by which it is named on the command line.
            refused: files of an earlier run or sweep that must not be there.

        Raises:
            ConfigError: it cannot be created, is in use, or holds records.
        """
        shown = display_path(folder)
        try:
            self.resources.enter_context(locked(folder))
        except OSError as error:
            raise ConfigError(f"{shown}: {error.strerror}; name another folder with {key}=FOLDER") from error
        if any(any(folder.glob(pattern)) for pattern in refused):
            raise ConfigError(
                f"{key}={shown}: holds records already, which would be overwritten; name another folder, or resume "
                "with resume=auto"
            )


@contextmanager
def exit_with_message(start: Start) -> Iterator[None]:
    """Turn an exception in the block into one message and an exit code, on the first rank that fails."""
    logging.raiseExceptions = False  # a closed pipe (`| head`) must not print tracebacks of the logging module
    failed: BaseException | None = None
    try:
        with handled_by(lambda *_: end_interrupted(start.hint()), signal.SIGINT), start.resources:
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
        error = start.world.first_failure(failed)
        failure = describe(error, start.typed)
        if not failure.is_user_error and not start.is_training:  # by Hydra's grammar, or a sweeper
            message = f"{failure.message} (HYDRA_FULL_ERROR=1 shows the traceback)"
            failure = replace(failure, message=message, is_user_error=True)
        if failure.status == "interrupted":
            # Before Hydra has configured logging, this goes to stderr.
            log.warning("%s%s", failure.message, start.hint())
            sys.exit(failure.exit_code)
        if isinstance(error, PeerError) and not start.world.is_main:
            sys.exit(failure.exit_code)  # the rank that failed shows its message, and rank 0 repeats it
        end(error, failure)
    if start.world.is_main and not start.is_training:  # after --help, or nothing was left to do
        start.world.broadcast_object(lambda: None)
    start.world.disconnect()


def import_trainer() -> type[Trainer]:
    """Import `Trainer`, and with it torch; not before, because `--help` needs neither."""
    gc.disable()  # it would scan the objects of an import again and again
    import torch

    from vitmnist.trainer import Trainer

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler
    if not gc.get_freeze_count():  # a job of a sweep would examine millions of imported objects, which takes 0.3 s
        gc.freeze()
    gc.enable()
    return Trainer


def connect_ranks() -> World:
    """Connect this process to the other ranks, if there are any; raises `ConfigError` if they cannot be reached."""
    if not launched():
        return SINGLE_PROCESS
    from vitmnist.runtime.torch_world import TorchWorld  # imports torch

    return TorchWorld()


def check_restarts(typed: list[str]) -> None:
    """Raise `ConfigError` if torchrun would restart what cannot be resumed: it repeats the same arguments."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and "resume" not in map(key_of, typed):
        raise ConfigError(f"--max-restarts={restarts}: a restart would begin a new run; type {AUTO_FORM} as well")


def start_other_ranks(world: World, typed: list[str], folder: Path, config: Config) -> None:
    """Let the other ranks train in the folder and with the configuration of this one."""
    start = {"folder": str(folder), "typed": without_keys(typed, ["data.root"]), "config": to_plain_dict(config)}
    world.broadcast_object(lambda: start)


def follow_rank_0(world: World, typed: list[str]) -> tuple[Config, Path] | None:
    """The configuration and the folder of rank 0, on another rank; None if rank 0 ends without a run.

    Raises:
        ConfigError: this rank was started with other arguments. Only the data may be elsewhere on another machine.
    """
    start: dict[str, Any] | None = world.broadcast_object(dict)
    if start is None:
        return None
    if without_keys(typed, ["data.root"]) != start["typed"]:
        raise ConfigError(
            f"rank {world.rank} was started differently: {' '.join(typed)} (rank 0: {' '.join(start['typed'])}); "
            "start every rank with the same arguments"
        )
    if data_root := value_of("data.root", typed):
        start["config"]["data"]["root"] = data_root
    folder = Path(start["folder"])
    line = "%(asctime)s  %(message)s"
    logging.basicConfig(filename=folder / f"rank-{world.rank}.log", level=logging.INFO, format=line, force=True)
    return validate(Config, start["config"]), folder
