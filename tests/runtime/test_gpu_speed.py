"""What keeps a GPU from waiting, on a simulated one: work ahead of time, and windows that are long enough."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.training import test_step
from vitmnist.checkpoint.manager import CheckpointManager
from vitmnist.data.datasets.base import Dataset
from vitmnist.diagnosis import measure
from vitmnist.errors import TrainingError
from vitmnist.optim.optimizers import EMA
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
    with Benchmark() as benchmark:
        candidate = benchmark.add("list", lambda: LoaderCandidate(loader, torch.device(device)))
        cold = candidate.warm_up
        benchmark.run(batches=10, seconds=60.0)
    is_gpu = device == "cuda"
    assert (candidate.warm_up is cold) != is_gpu
    timed = candidate.num_batches - NUM_WINDOWS * (40 if is_gpu else 3)
    assert timed > 3 if is_gpu else timed == 3
    assert {window.host_lead is None for window in candidate.windows} == {not is_gpu}


def test_a_step_does_not_walk_the_modules(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host queues a captured step in about 2 ms; a walk would take 0.1 ms."""
    step = test_step.make_step(tiny, clip_norm=0.5, micro_batch=None)
    batch = test_step.batch_of(tiny, step, 5)
    monkeypatch.setattr(step.model, "named_parameters", Mock(side_effect=AssertionError("a walk over the modules")))
    first, second = (float(step(batch)["loss"].detach()) for _ in range(2))
    assert first > second


def test_one_call_copies_all_buffers_of_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    ema, copies = EMA(model, 0.9), Mock(wraps=torch._foreach_copy_)
    model(torch.randn(8, 2))
    monkeypatch.setattr(torch, "_foreach_copy_", copies)
    ema.update()
    copies.assert_called_once()
    for ours, theirs in zip(ema.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_save_waits_once_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversion to bool waits for the GPU."""
    model, waits, convert = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [], Tensor.__bool__
    nn.init.constant_(model[1].bias, float("nan"))
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: waits.append(tensor) or convert(tensor))
    with pytest.raises(TrainingError, match="no longer finite"):
        CheckpointManager.save(SimpleNamespace(step=SimpleNamespace(model=model)), None)
    assert len(waits) == 1


@pytest.mark.parametrize(("host_lead", "expected"), [(0.1, Bottleneck.LAUNCH), (3.0, Bottleneck.COMPUTE)])
def test_diagnose_says_that_python_is_not_ahead_and_not_why(host_lead: float, expected: Bottleneck) -> None:
    """A step that reads a value back looks like one with many launches, so the advice names both."""
    seconds, waiting_pct = Spread(0.01, 0.01, 0.01, 5), Spread(2.0, 1.0, 3.0, 5)
    diagnosis = measure.Diagnosis(seconds, seconds, seconds, waiting_pct, 50, host_lead)
    assert diagnosis.bottleneck is expected
    assert (measure.LAUNCH_ADVICE in str(diagnosis)) == (expected is Bottleneck.LAUNCH)
    assert ".item()" in measure.LAUNCH_ADVICE
