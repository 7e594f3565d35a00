"""Errors that the user can fix, and how every exception is reported: its message, exit code and status.

The message of an error says what is wrong, what is allowed and what to type. Runs, sweeps, ranks and the command line
all ask `classify`; a new failure is a new row of `FAILURES`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from traceback import walk_tb
from typing import Literal


class ExitCode(IntEnum):
    """What the program exits with; docs/command-line.md explains each. 0 is done; signals have their own."""

    FAILED = 1
    USAGE = 2  # argparse has it too
    UNFINISHED = 75  # EX_TEMPFAIL of BSD's sysexits.h, "try again later"
    INTERRUPTED = 130  # what a shell shows after Ctrl-C
    PIPE_CLOSED = 141  # what a shell shows after SIGPIPE


class UserError(Exception):
    """Shown as its message alone, without a traceback."""

    exit_code: int = ExitCode.FAILED


class ConfigError(UserError):
    """A configuration value that cannot be used; the message names its key."""


class UnknownKeyError(ConfigError):
    """A key that the configuration does not have."""

    def __init__(self, key: str, siblings: list[str]) -> None:
        self.key, self.siblings = key, siblings
        super().__init__(key, siblings)  # all arguments, so that it can be pickled

    def __str__(self) -> str:
        return f"{self.key}: there is no such key; {allowed_names(self.key.rpartition('.')[2], self.siblings)}"


class DataError(UserError):
    """A data file is missing, damaged or of the wrong kind; the message names the file."""


class LoadingError(UserError):
    """A loader cannot deliver the next batch."""


class TrainingError(UserError):
    """Training cannot continue, for example because the loss is not finite."""


class ExportError(UserError):
    """An exported model does not predict what the original does."""


class MissingExtraError(UserError):
    """A package that only an extra installs is missing; the message has the command that installs it."""

    def __str__(self) -> str:
        missing, extra = self.args
        return f"{missing} is not installed; type pip install 'vitmnist[{extra}]'"


class PeerError(UserError):
    """Another rank of the same run has failed; the message gives its reason."""


class RunInterrupted(BaseException):
    """The run was asked to stop, and has saved a checkpoint.

    Like `KeyboardInterrupt` not an `Exception`, so that `except Exception` in a library does not swallow it.
    """


class TimeLimitReached(RunInterrupted):
    """The run has reached its `max_minutes`; the other jobs of a sweep go ahead."""


def allowed_names(wrong: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest allowed name, then all of them."""
    names = sorted(allowed)
    return f"{nearest(wrong, names)} allowed: {', '.join(names) or 'none'}".lstrip()


def listed(names: Iterable[str]) -> str:
    """The first ten of some names, or lines, that may come from a file."""
    every = list(names)
    return ", ".join(map(printable, every[:10])) + f", … ({len(every)} in all)" * (len(every) > 10)


def nearest(wrong: str, allowed: Iterable[str]) -> str:
    """`did you mean …?` with the closest allowed name, ignoring case; empty if none is close."""
    names = {name.lower(): name for name in allowed}
    near = get_close_matches(wrong.lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else ""


def printable(text: str | Path) -> str:
    """Escape what is not printable, such as ESC, in a file name or text of unknown origin, for a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def first_line(error: BaseException) -> str:
    """The first line of a message, without the details that OmegaConf and torch add below it."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn any error into a `DataError` that says what failed, and the transform or function that raised it."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{what}: {error}") from error
    except Exception as error:  # reading a sample may fail in any way
        frames = [frame for frame, _ in walk_tb(error.__traceback__)][2:]  # without those of this block
        calls = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name in ("__call__", "forward")]
        names = [type(call).__name__ for call in calls if call is not None] or [
            frame.f_code.co_name for frame in frames
        ]
        raise DataError(f"{what}: {''.join(f'{name} raised ' for name in names[-1:])}{described(error)}") from error


def described(error: BaseException) -> str:
    """An exception of other people's code: its type and the first line; the message alone of a `UserError`."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


@dataclass(frozen=True)
class Failure:
    """How an exception is reported."""

    message: str
    exit_code: int = ExitCode.FAILED
    status: Literal["failed", "interrupted"] = "failed"
    is_user_error: bool = True
    """Shown as its message alone; otherwise with a traceback, because the program is at fault."""


def classify(error: BaseException) -> Failure:
    """The first row of `FAILURES` that fits."""
    for recognises, describe in FAILURES:
        if recognises(error):
            failure = describe(error)
            return failure if isinstance(failure, Failure) else Failure(failure)
    return Failure(described(error), is_user_error=False)


def _is(kind: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, kind)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host could not allocate a tensor."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    messages = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def is_device_error(error: BaseException) -> bool:
    """Whether the GPU has failed, after which no process that used it can use it again."""
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def is_worker_error(error: BaseException) -> bool:
    """Whether torch reports that a DataLoader worker has died, or hangs."""
    return str(error).startswith(("DataLoader worker (pid", "DataLoader timed out"))


def is_shared_memory_full(error: BaseException) -> bool:
    """Whether a worker, its queue or a batch could not be put into /dev/shm; torch says so in one of these ways."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS):  # for a semaphore it names no file
        names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
        return any(name.startswith("multiprocessing.") for name in names)
    return re.search(r"</torch_.*No space left|out of shared memory|insufficient shared memory", str(error)) is not None


def are_too_many_files_open(error: BaseException) -> bool:
    """Whether this process or a worker has reached its limit of open files; each batch from a worker needs some."""
    return re.search(r"Too many open files|received \d+ items of ancdata", str(error)) is not None


def _shared_memory_full(error: BaseException) -> str:
    return (
        "the shared memory /dev/shm, through which workers hand over their batches, is full or read-only: "
        f"{_last_line(error)}; start the container with more, as in docker run --shm-size=2g, or type fewer workers "
        "with data.loader.num_workers=N (0 needs none)"
    )


def _too_many_files(error: BaseException) -> str:
    return (
        f"too many open files: {_last_line(error)}; allow more with ulimit -n 4096, or type fewer workers with "
        "data.loader.num_workers=N (0 needs none)"
    )


def _last_line(error: BaseException) -> str:
    """The end of a worker's traceback, which torch makes the message of the error."""
    return (str(error).strip().splitlines() or [""])[-1]


def _worker_error(error: BaseException) -> str:
    message = str(error).strip().rstrip(".")
    if message.startswith("DataLoader timed out"):
        return (
            "disk: no batch came from a worker in time; look for what blocks it, or raise data.loader.timeout_s "
            f"(null waits forever): {message}"
        )
    return f"disk: {message}. A killed worker often exceeded the memory limit; try fewer with data.loader.num_workers=N"


def _out_of_memory(error: BaseException) -> str:
    advice = "try a smaller batch_size, a smaller model, or data/loader=ram, which keeps the dataset off the GPU"
    return f"out of memory: {first_line(error) or type(error).__name__}; {advice}"


def _device_error(error: BaseException) -> str:
    advice = "start again in a new process; if it fails again, CUDA_LAUNCH_BLOCKING=1 HYDRA_FULL_ERROR=1 shows where"
    return f"the GPU failed: {first_line(error)}; {advice}"


def lacks_determinism(error: BaseException) -> bool:
    """Whether a model uses an operation that adds up in any order on a GPU."""
    return isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error)


def _lacks_determinism(error: BaseException) -> str:
    advice = "use another one, or set trainer.deterministic=false"
    return f"{str(error).partition(',')[0]}, so a resumed run would not repeat every bit; {advice}"


def is_single_image(error: BaseException) -> bool:
    """Whether batch normalisation had a single value per channel to take statistics from."""
    return isinstance(error, ValueError) and "Expected more than 1 value per channel" in str(error)


def _single_image(error: BaseException) -> str:
    advice = "set data.drop_last=true, trainer.micro_batch=null, or another batch_size"
    return f"a batch or microbatch has one image: {first_line(error)}; {advice}"


def _os_error(error: BaseException) -> str:
    """File and reason; a full standard output has no file, and libraries give a text alone."""
    assert isinstance(error, OSError)
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error) or type(error).__name__


def _user_error(error: BaseException) -> Failure:
    return Failure(str(error), error.exit_code if isinstance(error, UserError) else ExitCode.FAILED)


FAILURES: tuple[tuple[Callable[[BaseException], object], Callable[[BaseException], Failure | str]], ...] = (
    (_is(RunInterrupted), lambda error: Failure(str(error), ExitCode.UNFINISHED, "interrupted")),
    (_is(KeyboardInterrupt), lambda error: Failure("interrupted", ExitCode.INTERRUPTED, "interrupted")),
    (is_shared_memory_full, _shared_memory_full),
    (are_too_many_files_open, _too_many_files),
    (_is(UserError), _user_error),
    (is_out_of_memory, _out_of_memory),
    (is_device_error, _device_error),
    (lacks_determinism, _lacks_determinism),
    (is_single_image, _single_image),
    (is_worker_error, _worker_error),
    (_is(OSError), _os_error),  # a full disk, a folder that was removed during the run
)
"""A predicate, and what it recognises as a `Failure`, or as the message of an error that the user can fix. The first
row that fits counts."""
