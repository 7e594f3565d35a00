"""A diagnosis finds what limits a loop, times loaders with the same batches, and restores all states."""

import multiprocessing
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tests.support.samples import Made
from vitmnist import diagnose, make_loader
from vitmnist.auditing import find_leftovers, find_running
from vitmnist.diagnosis import measure
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.timer import EpochTimer
from vitmnist.timing import benchmark as benchmark_module
from vitmnist.timing.benchmark import NUM_WINDOWS, Benchmark, LoaderCandidate
from vitmnist.timing.table import Bottleneck, Spread, format_timings

SLOW_S = 0.005
WORKERS_ARE_SPAWNED = multiprocessing.get_all_start_methods()[0] == "spawn"  # This is so on Windows and macOS.
ENOUGH_S = 600.0  # A time limit (s) that no measurement reaches, even on a busy machine


def samples(seconds: float = 0.0) -> Made:
    """Pairs of three numbers and the index. Reading a pair takes `seconds`."""

    def make(index: int) -> tuple[Tensor, int]:
        time.sleep(seconds)
        return torch.full((3,), float(index)), index

    return Made(make, 60)


class Halved(DataLoader[Any]):
    """Overrides `__iter__`."""

    def __iter__(self) -> Any:
        return (images / 2 for images, _ in super().__iter__())


class Counting(nn.Module):
    """Keeps state in a buffer that a `state_dict` lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x


def brief(loader: Any, step: Callable[..., object] = lambda batch: None, **options: Any) -> Any:
    return diagnose(loader, step, **{"batches": 5, "seconds": ENOUGH_S, **options})


def test_a_slow_loader_is_input_bound_and_loaders_that_decode_once_are_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diagnosis = brief(DataLoader(samples(SLOW_S), batch_size=4, shuffle=True), batches=20)
    assert diagnosis.bottleneck is Bottleneck.INPUT
    assert re.search(r"^input-bound: \d+% of the time is spent waiting for data$", str(diagnosis), re.MULTILINE)
    assert min(diagnosis.loading_s.low, diagnosis.batch_s.low) >= 4 * SLOW_S
    assert diagnosis.waiting_pct.median > 90
    assert diagnosis.step_s.median < diagnosis.loading_s.median
    baseline, _, decoded = diagnosis.timings
    assert [timing.name for timing in diagnosis.timings] == ["as it is", "num_workers=2", "from_dataloader"]
    failed = [timing.name for timing in diagnosis.timings if timing.error]
    assert failed == (["num_workers=2"] if WORKERS_ARE_SPAWNED else [])
    assert decoded.batch_s.median < diagnosis.batch_s.median == baseline.batch_s.median
    assert baseline.epoch_s.low >= 15 * 4 * SLOW_S
    assert decoded.setup_s > SLOW_S
    assert decoded.break_even_epoch >= 1
    assert format_timings(diagnosis.timings) in capsys.readouterr().out
    assert asdict(diagnosis)["timings"][2]["setup_s"] == decoded.setup_s


def test_the_step_is_measured_alone_and_few_steps_have_no_verdict() -> None:
    diagnosis = brief([1] * 10, lambda batch: time.sleep(SLOW_S))
    assert diagnosis.step_s.low >= SLOW_S
    assert diagnosis.batch_s.low >= SLOW_S
    assert diagnosis.bottleneck is Bottleneck.TOO_FEW_STEPS
    assert f"no verdict: it needs 20 steps, and only {diagnosis.steps} were measured" in str(diagnosis)


def test_model_optimizer_and_random_generators_are_restored(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), Counting())
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(3)

    def step(batch: list[Tensor]) -> None:
        model.train()
        model(batch[0] + np.random.rand() + random.random()).sum().backward()
        optimizer.step()

    def state() -> list[Any]:
        library_states = [np.random.get_state()[1].tolist(), random.getstate()]
        generators = [torch.get_rng_state(), generator.get_state(), *library_states]
        weights = [value.clone() for value in model.state_dict().values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        return [*generators, *weights, model[2].steps.clone(), optimizer.state_dict()["state"], gradients]

    model[1].eval()  # Only the dropout is in evaluation mode, like a frozen layer.
    before = state()
    brief(DataLoader(samples(), 4, shuffle=True, generator=generator), step, model=model, optimizer=optimizer)
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    assert [module.training for module in model] == [True, False, True]
    note = "with model= and optimizer=, their states are restored"
    assert note not in capsys.readouterr().out
    brief([(torch.ones(4, 3), torch.ones(4))] * 20, step, model=model)
    assert note in capsys.readouterr().out


def test_other_iterables_are_measured_without_alternatives() -> None:
    with make_loader("ram", (torch.ones(40, 3), torch.arange(40)), batch_size=4, device="cpu", seed=0) as own_loader:
        for loader in (own_loader, Halved(samples(), 4)):
            assert [timing.name for timing in brief(loader).timings] == ["as it is"]


@pytest.mark.parametrize(("loader", "reason"), [([], "has no batches"), (iter([1]), "is an iterator, which cannot")])
def test_loaders_without_batches_and_iterators_are_refused(loader: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"^the loader {reason}"):
        brief(loader)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    list(tqdm([0]))  # Start the thread that tqdm keeps in each process.
    running_before = find_running()
    calls = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            model.weight.zero_()
        if calls >= 9:
            raise ZeroDivisionError("of the step")

    with pytest.raises(ZeroDivisionError, match="of the step"):
        brief(DataLoader(samples(), 4), step, model=model)
    assert torch.equal(model.weight, before)
    assert not find_leftovers(running_before)


def only_here(index: int) -> tuple[Tensor, int]:
    """Fails in a worker, and at an index that the loop does not read."""
    if torch.utils.data.get_worker_info() or index == 5:
        raise OSError("the file is only here")
    time.sleep(SLOW_S)
    return torch.full((3,), float(index)), index


def test_an_alternative_that_fails_is_refused_alone() -> None:
    diagnosis = brief(DataLoader(Made(only_here), batch_sampler=[[0, 1]] * 20))
    errors = {timing.name: timing.error for timing in diagnosis.timings}
    assert errors["as it is"] is None
    assert diagnosis.waiting_pct.median > 50
    expected = "not tried: " if WORKERS_ARE_SPAWNED else "Caught OSError in DataLoader worker process"
    assert expected in errors["num_workers=2"]
    assert errors["from_dataloader"].endswith("only_here raised OSError: the file is only here")


class SlowStart:
    """Has no length, and its first batch takes longer than the others."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.1)
        yield from range(60)


def test_waiting_is_measured_between_steps_and_no_row_guesses_the_length_of_an_epoch() -> None:
    diagnosis = brief(SlowStart(), lambda batch: time.sleep(0.02))
    assert diagnosis.waiting_pct.median < 50
    assert diagnosis.timings[0].error == "the length of an epoch is unknown"


def test_a_loop_keeps_its_persistent_workers() -> None:
    loader = DataLoader(samples(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    brief(loader)
    assert loader._iterator is None


def test_the_gpu_of_a_mac_is_refused() -> None:
    model = Mock(parameters=lambda: iter([Mock(device=torch.device("mps"))]))
    with pytest.raises(ConfigError, match=r"^mps is not supported yet: .*; set device=cpu$"):
        diagnose([torch.zeros(2)], print, model=model)


@pytest.mark.parametrize(("host_lead", "expected"), [(0.1, Bottleneck.LAUNCH), (3.0, Bottleneck.COMPUTE)])
def test_diagnose_says_that_python_is_not_ahead_and_not_why(host_lead: float, expected: Bottleneck) -> None:
    """A step that reads a value back looks like one with many launches, so the advice names both."""
    seconds, waiting_pct = Spread(0.01, 0.01, 0.01, 5), Spread(2.0, 1.0, 3.0, 5)
    diagnosis = measure.Diagnosis(seconds, seconds, seconds, waiting_pct, 50, host_lead)
    assert diagnosis.bottleneck is expected
    assert (measure.LAUNCH_ADVICE in str(diagnosis)) == (expected is Bottleneck.LAUNCH)
    assert ".item()" in measure.LAUNCH_ADVICE


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
