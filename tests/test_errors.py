"""The table of failures: what each exception means for the message, the exit code and the traceback."""

import errno
import os
from collections.abc import Callable

import pytest
import torch

from vitmnist.errors import ConfigError, RunInterrupted, classify_error

SHM = "--shm-size=2g"
BUS = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
OUT_OF_HOST_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=cache or disk"
OUT_OF_GPU_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=ram"
GPU_FAILED = "the GPU failed: CUDA error: unspecified launch failure; start again"
USER_ERROR = (1, "failed", True)  # exit code, status, whether it is shown without a traceback


def raised_by(action: Callable[[], object]) -> Exception:
    """The error as this version of torch words it."""
    with pytest.raises(RuntimeError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        (ConfigError("seed=-1: must be at least 0"), "seed=-1", USER_ERROR),
        (RunInterrupted("SIGTERM was received"), "SIGTERM was received", (75, "interrupted", True)),
        (KeyboardInterrupt(), "interrupted", (130, "interrupted", True)),
        (KeyboardInterrupt("interrupted; results: cut"), "; results: cut", (130, "interrupted", True)),
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_GPU_MEMORY, USER_ERROR),
        (MemoryError(), OUT_OF_HOST_MEMORY, USER_ERROR),
        (RuntimeError("CUDA error: out of memory\nDetails."), OUT_OF_GPU_MEMORY, USER_ERROR),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OUT_OF_GPU_MEMORY, USER_ERROR),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nDetails."), GPU_FAILED, USER_ERROR),
        (raised_by(lambda: torch.empty(2**50)), OUT_OF_HOST_MEMORY, USER_ERROR),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "num_workers=N", USER_ERROR),
        (RuntimeError("DataLoader timed out after 5 seconds"), "data.loader.timeout_s", USER_ERROR),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.pt"), "x.pt: No space left on device", USER_ERROR),
        (RuntimeError("Caught RuntimeError\nunable to write to file </torch_1>: No space left"), SHM, USER_ERROR),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. " + BUS), SHM, USER_ERROR),
        (ZeroDivisionError(), "ZeroDivisionError", (1, "failed", False)),
        (RuntimeError("shape mismatch"), "shape mismatch", (1, "failed", False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_failure_has_its_message_code_and_status(error: BaseException, message: str, expected: tuple) -> None:
    failure = classify_error(error)
    assert message in failure.message
    assert "Details" not in failure.message
    assert (failure.exit_code, failure.status, failure.is_user_error) == expected
