"""One table: exception -> message, exit code, status, and whether the user can fix it.

Runs, sweeps, ranks and the command line all ask `classify`. A new failure is a new row of `FAILURES`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Literal

from vitmnist.errors import ExitCode, LoadingError, UserError, first_line
from vitmnist.runtime.signals import RunInterrupted


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
    for kind, describe in FAILURES:
        if isinstance(error, kind) if isinstance(kind, type) else kind(error):
            failure = describe(error)
            return failure if isinstance(failure, Failure) else Failure(failure)
    return Failure(str(error) or type(error).__name__, is_user_error=False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host could not allocate a tensor."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    messages = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def is_device_error(error: BaseException) -> bool:
    """Whether the GPU has failed, after which no process that used it can use it again."""
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def worker_error(error: BaseException) -> LoadingError | None:
    """torch's report of a DataLoader worker that died or hangs, with advice; None for any other error."""
    message = str(error).strip().rstrip(".")
    if message.startswith("DataLoader timed out"):
        return LoadingError(
            "disk: no batch came from a worker in time; look for what blocks it, or raise data.loader.timeout_s "
            f"(null waits forever): {message}"
        )
    if not message.startswith("DataLoader worker (pid"):
        return None
    if is_shared_memory_full(error):
        return LoadingError(_shared_memory_full(error))
    return LoadingError(
        f"disk: {message}. A killed worker often exceeded the memory limit; try fewer with data.loader.num_workers=N"
    )


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
    return (
        f"a batch or microbatch has one image: {first_line(error)}; set data.drop_last=true, trainer.micro_batch=null, "
        "or another batch_size"
    )


def os_error(error: OSError) -> str:
    """File and reason; a full standard output has no file, and libraries give a text alone."""
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error) or type(error).__name__


FAILURES: tuple[tuple[type[BaseException] | Callable[[BaseException], object], Callable[[Any], Failure | str]], ...] = (
    (RunInterrupted, lambda error: Failure(str(error), ExitCode.UNFINISHED, "interrupted")),
    (KeyboardInterrupt, lambda error: Failure("interrupted", ExitCode.INTERRUPTED, "interrupted")),
    (is_shared_memory_full, _shared_memory_full),
    (are_too_many_files_open, _too_many_files),
    (UserError, lambda error: Failure(str(error), error.exit_code)),
    (is_out_of_memory, _out_of_memory),
    (is_device_error, _device_error),
    (lacks_determinism, _lacks_determinism),
    (is_single_image, _single_image),
    (worker_error, lambda error: str(worker_error(error))),
    (OSError, os_error),  # a full disk, a folder that was removed during the run
)
"""What to recognise (a type or a predicate), and its `Failure` or the message of an error that the user can fix. The
first row that fits counts, so a subclass of `UserError` must come before it."""
