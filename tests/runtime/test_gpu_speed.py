"""What keeps a GPU from waiting, on a simulated one: work ahead of time, and windows that are long enough."""

import threading

import pytest
import torch
from torch import Tensor

from vitmnist.data import sampler as sampler_module
from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.timer import EpochTimer
from vitmnist.timing import benchmark as benchmark_module
from vitmnist.timing.benchmark import NUM_WINDOWS, Benchmark, LoaderCandidate


def test_the_permutation_of_the_next_epoch_is_drawn_during_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "to", lambda tensor, *target, **options: tensor.clone())
    sampler_module._permutation.cache_clear()
    sampler = EpochSampler(size=50, batch_size=5, seed=3)
    for epoch in range(3):
        indices = sampler.indices(epoch, device="cuda")
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            thread.join(10)
        assert sampler_module._permutation.cache_info().misses == epoch + 2
        assert torch.equal(indices, torch.cat(list(sampler.batches(epoch))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_is_warm_and_its_windows_are_long_when_it_is_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a least time that no epoch reaches, each window on a GPU is a whole epoch."""
    monkeypatch.setattr(benchmark_module, "EpochTimer", lambda device: EpochTimer(torch.device("cpu")))
    monkeypatch.setattr(benchmark_module, "MIN_GPU_WINDOW_S", 1e6)
    monkeypatch.setattr(benchmark_module, "GPU_WARM_UP_S", 0.01)
    loader = [(torch.zeros(1), torch.zeros(1))] * 40
    with Benchmark() as benchmark:
        candidate = benchmark.add("list", lambda: LoaderCandidate(loader, torch.device(device)))
        cold = candidate.warm_up
        benchmark.run(batches=10, seconds=60.0)
    is_gpu = device == "cuda"
    assert (candidate.warm_up is cold) != is_gpu
    timed = candidate.num_batches - NUM_WINDOWS * (40 if is_gpu else 3)
    assert timed > 3 if is_gpu else timed == 3
    assert {window.host_lead is None for window in candidate.windows} == {not is_gpu}
