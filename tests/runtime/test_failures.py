"""The table of failures: what each exception means for the message, the exit code and the traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.conftest import Train, result_of
from vitmnist.errors import ConfigError
from vitmnist.runtime.failures import Failure, classify
from vitmnist.runtime.signals import RunInterrupted
from vitmnist.training.step import TrainStep

OUT_OF_MEMORY = "try a smaller batch_size, a smaller model, or data/loader=ram"


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        (ConfigError("seed=-1: must be at least 0"), "seed=-1", Failure("")),
        (RunInterrupted("SIGTERM was received"), "SIGTERM was received", Failure("", 75, "interrupted")),
        (RunInterrupted("the time limit"), "the time limit", Failure("", 75, "interrupted")),
        (KeyboardInterrupt(), "interrupted", Failure("", 130, "interrupted")),
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY, Failure("")),
        (MemoryError(), OUT_OF_MEMORY, Failure("")),
        (RuntimeError("CUDA error: out of memory\nDetails."), OUT_OF_MEMORY, Failure("")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OUT_OF_MEMORY, Failure("")),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nDetails."),
            "GPU failed: CUDA",
            Failure(""),
        ),
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


def test_a_failed_gpu_is_shown_with_its_operation_if_kernels_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not classify(RuntimeError("CUDA error: device-side assert triggered")).is_user_error


def test_a_gpu_that_fails_in_the_middle_ends_the_run_with_one_message(
    train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error that torch raises, from the second epoch's first step on."""
    step, calls = TrainStep.__call__, 0

    def lost(self: TrainStep, *parts: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for `cudaError`.")
        return step(self, *parts)

    monkeypatch.setattr(TrainStep, "__call__", lost)
    ended = train_here(*quick, "hydra.run.dir=here")
    assert ended.returncode == 1
    assert "error: the GPU failed: CUDA error: unspecified launch failure; start again" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Search for" not in ended.stderr
    result = result_of(tmp_path / "here")
    assert (result["status"], len(result["epochs"])) == ("failed", 1)
    assert result["error"].startswith("the GPU failed: CUDA error: unspecified launch failure; ")
