"""Alternatives to the loader of a script are timed with an imitated step."""

import time
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchvision.transforms import Compose

from tests.support.processes import start_method
from tests.support.samples import Made
from vitmnist import from_dataloader
from vitmnist.diagnosis import candidates
from vitmnist.diagnosis.candidates import ImitatedStep, build_replacement_candidate, find_best_change, time_alternatives
from vitmnist.diagnosis.observed_loader import DataPass, LoaderInfo, ObservedLoader
from vitmnist.timing.benchmark import LoaderCandidate
from vitmnist.timing.table import LoaderTiming, Spread


def ones(index: int) -> Tensor:
    return torch.ones(3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


class Transformed(Made):
    def __init__(self, *transforms: Any) -> None:
        super().__init__(ones)
        self.transform = Compose(list(transforms))

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(super().__getitem__(index))


def slow(sample: Tensor) -> Tensor:
    time.sleep(0.002)
    return sample


def add_noise(sample: Tensor) -> Tensor:
    return sample + torch.rand(3)


def loop_over(dataset: Any, **options: Any) -> ObservedLoader:
    """A loader that a script iterated for 10 batches, with a step of 1 ms."""
    loader, info = DataLoader(dataset, 4, **options), LoaderInfo("Made", 40, 4, 0, "mine.py:1")
    passes = [DataPass(0.0, 1.0, batches=10, is_exhausted=True)]
    return ObservedLoader(info, rebuilt_loader=loader, passes=passes, batches=10, steps_s=[0.001])


@pytest.mark.parametrize(
    ("method", "change", "error"),
    [
        ("fork", "DataLoader(…, num_workers=2)", None),
        ("forkserver", "DataLoader(…, num_workers=2, multiprocessing_context='fork')", None),
        ("spawn", None, "not tried: workers are not forked, and would import the script again"),
    ],
)
def test_workers_that_the_script_does_not_have_are_forked_or_not_tried(
    method: str, change: str | None, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers would import the script again, and could not get samples from a closure."""
    monkeypatch.setattr(candidates, "available_cores", lambda: 2)
    with start_method(method):
        timings, _ = time_alternatives(loop_over(Made(lambda index: slow(ones(index)))))
    (timing,) = [timing for timing in timings if timing.name == "num_workers=2"]
    assert (timing.change, timing.error) == (change, error)


@pytest.mark.parametrize(("is_exhausted", "epoch_length"), [(True, 10), (False, None)])
def test_an_epoch_without_a_length_is_as_long_as_a_pass_that_has_reached_its_end(
    is_exhausted: bool, epoch_length: int | None
) -> None:
    loop = loop_over(Stream())
    loop.passes[0].is_exhausted = is_exhausted
    assert loop.epoch_length == epoch_length
    (timing, *_) = time_alternatives(loop)[0]
    assert timing.error == (None if is_exhausted else "the length of an epoch is unknown")


def test_samples_that_fail_after_the_script_leave_rows_that_say_so() -> None:
    def closed(index: int) -> Tensor:
        raise RuntimeError("the pool is closed")

    timings, seconds_by_stage = time_alternatives(loop_over(Made(closed)))
    assert seconds_by_stage == {}
    assert all("the pool is closed" in str(timing.error) for timing in timings)


@pytest.mark.parametrize(("cores", "threads"), [(0.0, 1), (0.6, 1), (1.0, 1), (1.9, 2), (1.4, 2)])
def test_an_imitated_step_takes_the_time_and_the_cores_of_the_scripts(cores: float, threads: int) -> None:
    """Compare processor time, because other programs may use the cores."""
    step = ImitatedStep(0.02, cores)
    began, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(10):
        step(None)
    assert time.perf_counter() - began >= 10 * 0.02 * 0.5
    assert time.process_time() - cpu_s == pytest.approx(10 * 0.02 * cores, rel=0.5, abs=0.02)
    assert step.threads == threads


def test_random_transforms_are_timed_one_by_one_and_tried_on_tensors_too() -> None:
    dataset = Transformed(slow, add_noise)
    timings, seconds_by_stage = time_alternatives(loop_over(torch.utils.data.Subset(dataset, range(8))))
    assert timings[-1].name == 'from_dataloader, transforms="tensor"'
    assert [*seconds_by_stage] == ["decoding and reading", "slow", "add_noise", "collating"]
    assert seconds_by_stage["slow"] == max(seconds_by_stage.values())
    assert dataset.transform.transforms == [slow, add_noise]
    timings, _ = time_alternatives(loop_over(dataset, collate_fn=torch.stack))  # Tensors are not for a collate_fn.
    assert timings[-1].name == "from_dataloader"


def test_the_set_up_time_is_estimated_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a part of the samples is decoded, and most of the time is spent reading them."""
    monkeypatch.setattr("vitmnist.diagnosis.candidates.MAX_DECODING_S", 0.1)
    samples = Made(lambda index: slow(ones(index)), 800)
    candidate = build_replacement_candidate(DataLoader(samples, 4), LoaderCandidate(), 0.002, "exact")
    assert candidate.length < 800 / 4
    samples.reads.clear()
    from_dataloader(DataLoader(samples, 4))
    assert candidate.setup_s >= 0.4 * len(samples.reads) * 0.002


@pytest.mark.parametrize(
    ("epoch_s", "setup_s", "epochs", "expected"),
    [(0.5, 1.0, 9, "x"), (0.5, 1.0, 2, None), (0.9, None, 9, None), (0.5, 9.0, inf, "x"), (0.5, None, 1, "x")],
)
def test_a_change_is_named_if_the_epochs_of_the_script_pay_for_it(
    epoch_s: float, setup_s: float | None, epochs: float, expected: str | None
) -> None:
    """An epoch with the loader in use takes a second."""
    timings = [
        LoaderTiming("as it is", epoch_s=Spread.of([1.0])),
        LoaderTiming("x", None, Spread.of([epoch_s]), 0.0, setup_s, 1, "x"),
    ]
    assert find_best_change([*timings, LoaderTiming("failed", error="why", change="y")], epochs) == expected
