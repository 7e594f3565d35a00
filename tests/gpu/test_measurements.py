"""Times and memory are measured on the GPU, not on the host that queues its work."""

import time

import pytest
import torch

from tests.gpu.conftest import NEEDS_CUDA
from vitmnist.runtime.memory import measure_free_memory
from vitmnist.runtime.timer import EpochTimer
from vitmnist.tracking.environment import measure_peak_memory, reset_peak_memory

pytestmark = NEEDS_CUDA


def test_memory_is_measured_from_the_beginning_of_the_run(cuda: torch.device) -> None:
    block = torch.zeros(2**28, dtype=torch.uint8, device=cuda)
    del block
    torch.cuda.empty_cache()
    assert measure_free_memory(cuda) > 2**20
    reset_peak_memory(cuda)
    peak = measure_peak_memory(cuda)["gpu_peak_mib"]
    assert peak is not None
    assert peak < torch.cuda.memory_allocated(cuda) / 2**20 + 1


def test_the_host_leads_a_slow_gpu_and_not_a_fast_one(cuda: torch.device) -> None:
    timer, images = EpochTimer(cuda), torch.ones(64, 64, device=cuda)
    torch.cuda._sleep(1000)
    for gpu_cycles, host_s, leads in ((20_000_000, 0.0, True), (1000, 0.01, False)):
        timer.start()
        for _ in timer.waiting(range(10)):
            torch.cuda._sleep(gpu_cycles)
            images.sum()
            time.sleep(host_s)
        timer.stop()
        assert (timer.host_lead_s > sum(timer.seconds().values()) / 20) == leads


def test_the_timer_charges_a_slow_kernel_to_computing(cuda: torch.device) -> None:
    torch.cuda._sleep(1000)
    timer = EpochTimer(cuda)
    timer.start()
    started = time.perf_counter()
    for _ in timer.waiting(range(3)):
        torch.cuda._sleep(50_000_000)
    timer.stop()
    outside = time.perf_counter() - started
    seconds = timer.seconds()
    assert seconds["computing"] > 10 * seconds["waiting"]
    assert sum(seconds.values()) == pytest.approx(outside, rel=0.01)
