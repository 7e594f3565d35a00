"""A captured step replays what the eager step computes; what cannot be captured is refused and spoils nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.gpu import NEEDS_CUDA
from tests.training import test_step
from vitmnist.config.schema import Precision
from vitmnist.data.datasets.base import Dataset
from vitmnist.runtime.backend import _capture_stream, backend_of
from vitmnist.training.compilation import compile_step
from vitmnist.training.cuda_graph import capture_step

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("optimizer", test_step.OPTIMIZERS_UNDER_TEST)
@pytest.mark.parametrize("loader", ["gpu_slice", "ram", "prefetch", "disk"])
@pytest.mark.parametrize("compiled", [False, True])
def test_replay_on_the_gpu_is_the_eager_step_over_a_changing_rate(
    tiny: Dataset, cuda: torch.device, loader: str, optimizer: str, decay: float | None, compiled: bool
) -> None:
    """The same promise as on the CPU, with a real graph; nothing is read back while it is replayed."""
    eager, captured = (test_step.make_step(tiny, optimizer, decay=decay, device=cuda) for _ in range(2))
    with test_step.make_loader(tiny, loader, device=cuda) as batches:
        expected = test_step.train(eager, batches)
        metrics = test_step.train(captured, batches, epochs=1)
        if compiled:
            keys = next(captured.preprocess.keys(batches.sampler, 0))
            compile_step(captured, next(batches.epoch(0)), keys)
        capture_step(captured, batches, backend_of(cuda))
        metrics += test_step.train(captured, batches, epochs=2, first=1)
    assert [one["train_loss"] for one in metrics] == pytest.approx([one["train_loss"] for one in expected], rel=1e-3)
    test_step.check_same_weights(captured.model, eager.model, tolerance=1e-3)
    test_step.check_same_weights(captured.eval_model, eager.eval_model, tolerance=1e-3)
    assert captured.lr == eager.lr


def test_bf16_can_be_compiled_and_captured(tiny: Dataset, cuda: torch.device) -> None:
    step = test_step.make_step(tiny, device=cuda, precision=Precision.bf16)
    with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        compile_step(step, next(loader.epoch(0)), next(step.preprocess.keys(loader.sampler, 0)))
        capture_step(step, loader, backend_of(cuda))
        assert test_step.train(step, loader, epochs=1)[0]["train_loss"] > 0


def test_a_model_that_waits_for_the_gpu_is_not_captured_and_spoils_nothing() -> None:
    """In a process of its own: in torch 2.11 a capture that fails leaves the process unable to capture again."""
    program = """
        import torch
        from torch import nn
        from vitmnist.runtime.backend import backend_of

        device = torch.device("cuda", 0)
        backend, ones = backend_of(device), torch.ones(1000, device=device)
        before = torch.cuda.current_stream()
        for read_back in (lambda: ones.sum().item(), lambda: ones.nonzero(), lambda: ones.cpu()):
            try:
                backend.capture(read_back, 3)
            except RuntimeError as error:
                assert "synchronizing" in str(error), error
            else:
                raise AssertionError("captured")
            assert torch.cuda.current_stream() == before
            assert torch.cuda.get_sync_debug_mode() == 0
            torch.cuda.empty_cache()
        replay = backend.capture(lambda: ones.add_(1), 3)
        torch.cuda.synchronize()
        value = ones[0].item()
        replay()
        assert ones[0].item() == value + 1
        memory = torch.cuda.memory_allocated()
        weights = torch.ones(256, 256, device=device)
        for _ in range(5):
            backend.capture(lambda: weights @ weights, 3)
            torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - memory < 64 * 2**20, "one workspace of cuBLAS, not five"
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_thread_may_allocate_memory_while_a_step_is_captured(tiny: Dataset, cuda: torch.device) -> None:
    stop, uploads = threading.Event(), 0
    stream = torch.cuda.Stream(cuda)
    while stream.cuda_stream == _capture_stream(cuda).cuda_stream:  # torch hands out 32 streams in turn
        stream = torch.cuda.Stream(cuda)

    def upload() -> None:
        nonlocal uploads
        with torch.cuda.stream(stream):
            while not stop.is_set():
                # Always larger than what the allocator has kept.
                torch.ones((uploads + 1) * 2**20, dtype=torch.uint8).to(cuda, non_blocking=True)
                uploads += 1

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        step = test_step.make_step(tiny, device=cuda)
        with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
            capture_step(step, loader, backend_of(cuda))
    finally:
        stop.set()
        thread.join()
    assert uploads
