"""Errors that the user can fix, and the table that maps any exception to a message, exit code and status.

A message says what is wrong, what is allowed and what to set.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from traceback import walk_tb
from typing import Literal


class ExitCode(IntEnum):
    """The exit codes of all commands, as in argparse, BSD's `sysexits.h` and the shell; see docs/command-line.md."""

    FAILED = 1
    USAGE = 2
    UNFINISHED = 75
    INTERRUPTED = 130
    PIPE_CLOSED = 141


class UserError(Exception):
    """An error that the user can fix; its message is shown without a traceback."""

    exit_code: int = ExitCode.FAILED


class ConfigError(UserError):
    """A configuration value is invalid; the message names its key."""


class UnknownKeyError(ConfigError):
    """The configuration has no such key."""

    def __init__(self, key: str, siblings: list[str]) -> None:
        self.key, self.siblings = key, siblings
        super().__init__(key, siblings)  # Pickling passes these arguments to `__init__`.

    def __str__(self) -> str:
        return f"{self.key}: there is no such key; {suggest_names(self.key.rpartition('.')[2], self.siblings)}"


class DataError(UserError):
    """A data file is missing, damaged or of the wrong kind; the message names the file."""


class LoadingError(UserError):
    """A loader cannot deliver the next batch."""


class TrainingError(UserError):
    """Training cannot continue, for example because the loss is not finite."""


class MissingExtraError(UserError):
    """A package of an extra is missing; the message has the command that installs it."""

    def __str__(self) -> str:
        missing, extra = self.args
        return f"{missing} is not installed; run pip install 'vitmnist[{extra}]'"


class PeerError(UserError):
    """Another rank of the run failed; the message has the reason."""


class RunInterrupted(BaseException):
    """The run was asked to stop and has been saved. `except Exception` does not catch it."""


class TimeLimitReached(RunInterrupted):
    """The run has reached its `max_minutes`; the other jobs of a sweep continue."""


def suggest_names(unknown: str, allowed: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest match, if any, then all allowed names."""
    names = {name.lower(): name for name in sorted(allowed)}
    closest = get_close_matches(unknown.lower(), names, n=1)
    suggestion = f"did you mean {names[closest[0]]!r}? " if closest else ""
    return f"{suggestion}allowed: {', '.join(names.values()) or 'none'}"


def join_names(names: Iterable[str | Path]) -> str:
    """Join names for a message: the first ten, and their number if there are more."""
    texts = list(map(str, names))
    total = f", … ({len(texts)} in all)" if len(texts) > 10 else ""
    return ", ".join(texts[:10]) + total


def escape_unprintable(text: str) -> str:
    """Escape control characters, which a terminal would execute, except tabs and newlines."""
    return re.sub(r"[^\n\t]", lambda match: match[0] if match[0].isprintable() else ascii(match[0])[1:-1], text)


def first_line(error: BaseException) -> str:
    """Return the first line of a message; OmegaConf and torch add details below it."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def as_data_error(subject: str) -> Iterator[None]:
    """Turn any error in the block into a `DataError` that names `subject` and the transform or function that failed."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{subject}: {error}") from error
    except Exception as error:  # User code can raise any exception.
        function, transform = "", ""
        for frame, _ in list(walk_tb(error.__traceback__))[2:]:  # Skip this function and the block itself.
            function = frame.f_code.co_name
            if function in ("__call__", "forward") and "self" in frame.f_locals:
                transform = type(frame.f_locals["self"]).__name__
        origin = f"{transform or function} raised " if function else ""
        raise DataError(f"{subject}: {origin}{format_error(error)}") from error


def format_error(error: BaseException) -> str:
    """Format an exception as its type and the first line of its message; a `UserError` as its message alone."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


@dataclass(frozen=True)
class Failure:
    """The report of an exception. If `is_user_error` is false, it is a bug, and the traceback is shown too."""

    message: str
    exit_code: int = ExitCode.FAILED
    status: Literal["failed", "interrupted"] = "failed"
    cause: Literal["memory", "device", "worker"] | None = None
    is_user_error: bool = True


def classify_error(error: BaseException) -> Failure:
    """Classify an exception by its type or by the first matching row of `FAILURES`; any other is a bug."""
    if isinstance(error, UserError):
        return Failure(str(error), error.exit_code)
    if isinstance(error, RunInterrupted):
        return Failure(str(error), ExitCode.UNFINISHED, "interrupted")
    if isinstance(error, KeyboardInterrupt):
        return Failure(str(error) or "interrupted", ExitCode.INTERRUPTED, "interrupted")
    if isinstance(error, MemoryError):
        return Failure(f"out of host memory; {LESS_HOST_MEMORY}", cause="memory")
    if isinstance(error, RuntimeError | ValueError):
        for pattern, failure in FAILURES.items():
            if match := re.search(pattern, str(error)):
                return replace(failure, message=failure.message.format(text=match[0].strip()))
    if isinstance(error, OSError):  # For example, the disk is full. Some libraries set only the message.
        return Failure(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or first_line(error))
    return Failure(format_error(error), is_user_error=False)


FEWER_WORKERS = "set a smaller num_workers, on the command line with data.loader.num_workers=N (0 needs none)"
LESS_HOST_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=cache or disk, which read from files"
LESS_GPU_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=ram, which stores images in host memory"
FAILURES = {
    ".*(</torch_.*No space left|out of shared memory|insufficient shared memory).*": Failure(
        "the shared memory /dev/shm, through which workers hand over their batches, is full or read-only: {text}; "
        f"start the container with more, as in docker run --shm-size=2g, or {FEWER_WORKERS}"
    ),
    ".*can't allocate memory.*": Failure(f"out of host memory: {{text}}; {LESS_HOST_MEMORY}", cause="memory"),
    ".*(out of memory|CUBLAS_STATUS_ALLOC_FAILED).*": Failure(
        f"out of GPU memory: {{text}}; {LESS_GPU_MEMORY}", cause="memory"
    ),
    # After a CUDA error, the process can no longer use the GPU.
    "^CUDA error.*": Failure(
        "the GPU failed: {text}; start again in a new process; if it fails again, CUDA_LAUNCH_BLOCKING=1 "
        "HYDRA_FULL_ERROR=1 shows where",
        cause="device",
    ),
    r".*(/gloo/|caused pair closure|NCCL).*": Failure(
        "another rank does not answer: it failed (see its own message), was killed, or hung for "
        "distributed.timeout_s: {text}"
    ),
    "^Expected to have finished reduction in the prior iteration": Failure(
        "several ranks need a gradient for every parameter; freeze unused ones with lr_scale='{{NAME: 0}}'"
    ),
    "^Expected more than 1 value per channel when training": Failure(
        "batch normalisation cannot train on a batch or microbatch of one image; set data.drop_last=true if it is "
        "the last one, else trainer.micro_batch=null or a larger batch_size"
    ),
    r"\S+ does not have a deterministic implementation": Failure(
        "{text}, so a resumed run could differ in some bits; use another operation, or set trainer.deterministic=false"
    ),
    r"^DataLoader (timed out|worker \(pid).*": Failure(
        "disk: {text}: if the worker was killed, memory may have run out; if it is slow, set a larger "
        f"data.loader.timeout_s (null waits forever); {FEWER_WORKERS}",
        cause="worker",
    ),
}
"""Errors of torch that users can fix: a pattern of the message, and the report, where `{text}` is the matching part."""
