"""The table of failures: what each exception means for the message, the exit code and the traceback."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from vitmnist.errors import ConfigError
from vitmnist.runtime.failures import Failure, classify
from vitmnist.runtime.signals import RunInterrupted

OUT_OF_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=ram"


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        (ConfigError("seed=-1: must be at least 0"), "seed=-1", Failure("")),
        (RunInterrupted("SIGTERM was received", 143), "SIGTERM was received", Failure("", 75, "interrupted")),
        (RunInterrupted("the time limit", 0), "the time limit", Failure("", 75, "interrupted")),
        (KeyboardInterrupt(), "interrupted", Failure("", 130, "interrupted")),
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY, Failure("")),
        (MemoryError(), OUT_OF_MEMORY, Failure("")),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY, Failure("")),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "num_workers=N", Failure("")),
        (RuntimeError("DataLoader timed out after 5 seconds"), "data.loader.timeout_s", Failure("")),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.pt"), "x.pt: No space left on device", Failure("")),
        (ZeroDivisionError(), "ZeroDivisionError", Failure("", is_user_error=False)),
        (RuntimeError("shape mismatch"), "shape mismatch", Failure("", is_user_error=False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_failure_has_its_message_code_and_status(error: BaseException, message: str, expected: Failure) -> None:
    failure = classify(error)
    assert message in failure.message
    assert (failure.exit_code, failure.status, failure.is_user_error) == (
        expected.exit_code,
        expected.status,
        expected.is_user_error,
    )
