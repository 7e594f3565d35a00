"""What is measured on a GPU, on a simulated one: windows that are long enough, and whether the host is ahead."""

import pytest
import torch

from vitmnist.diagnosis import measure
from vitmnist.runtime.timer import EpochTimer
from vitmnist.timing import benchmark as benchmark_module
from vitmnist.timing.benchmark import NUM_WINDOWS, Benchmark, LoaderCandidate
from vitmnist.timing.table import Bottleneck, Spread


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_is_warm_and_its_windows_are_long_when_it_is_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a least time that no epoch reaches, each window on a GPU is a whole epoch."""
    monkeypatch.setattr(benchmark_module, "EpochTimer", lambda device: EpochTimer(torch.device("cpu")))
    monkeypatch.setattr(benchmark_module, "MIN_GPU_WINDOW_S", 1e6)
    monkeypatch.setattr(benchmark_module, "GPU_WARM_UP_S", 0.01)
    loader = [(torch.zeros(1), torch.zeros(1))] * 40
    benchmark = Benchmark()
    measurement = benchmark.add("list", lambda: LoaderCandidate(loader, torch.device(device)))
    cold = measurement.warm_up
    benchmark.run(batches=10, seconds=60.0)
    is_gpu = device == "cuda"
    assert (measurement.warm_up is cold) != is_gpu
    assert [window.batches for window in measurement.windows] == NUM_WINDOWS * [40 if is_gpu else 3]
    assert {window.host_lead is None for window in measurement.windows} == {not is_gpu}


@pytest.mark.parametrize(("host_lead", "expected"), [(0.1, Bottleneck.LAUNCH), (3.0, Bottleneck.COMPUTE)])
def test_diagnose_says_that_python_is_not_ahead_and_not_why(host_lead: float, expected: Bottleneck) -> None:
    """A step that reads a value back looks like one with many launches, so the advice names both."""
    seconds, waiting_pct = Spread(0.01, 0.01, 0.01, 5), Spread(2.0, 1.0, 3.0, 5)
    diagnosis = measure.Diagnosis(seconds, seconds, seconds, waiting_pct, 50, host_lead)
    assert diagnosis.bottleneck is expected
    assert (measure.LAUNCH_ADVICE in str(diagnosis)) == (expected is Bottleneck.LAUNCH)
    assert ".item()" in measure.LAUNCH_ADVICE
