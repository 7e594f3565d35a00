"""Alternatives to the loader of a script, timed with an imitated step."""

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
from vitmnist.diagnosis.candidates import (
    ImitatedStep,
    build_replacement,
    find_best_change,
    time_parts,
    try_loaders,
)
from vitmnist.diagnosis.loop import DataPass, LoaderInfo, Loop
from vitmnist.timing.benchmark import LoaderCandidate
from vitmnist.timing.table import Spread, TimingRow, format_rows


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


def loop_over(dataset: Any, **options: Any) -> Loop:
    """A loop of a script over 10 batches, with a step of 1 ms."""
    loader, info = DataLoader(dataset, 4, **options), LoaderInfo("Made", 40, 4, 0, "mine.py:1")
    passes = [DataPass(0.0, 1.0, batches=10, is_exhausted=True)]
    return Loop(info, plain_copy=loader, passes=passes, batches=10, steps_s=[0.001])


def test_a_row_that_cannot_be_timed_says_why() -> None:
    rows, _ = try_loaders(loop_over(Made(lambda index: torch.rand(3))))
    errors = {row.name: row.error for row in rows}
    assert errors["as it is"] is None
    assert "(it draws from torch) apart from the transforms" in str(errors["from_dataloader"])
    assert format_rows(rows).endswith(f"\nfrom_dataloader  {errors['from_dataloader']}")


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
        rows, _ = try_loaders(loop_over(Made(lambda index: slow(ones(index)))))
    (row,) = [row for row in rows if row.name == "num_workers=2"]
    assert (row.change, row.error) == (change, error)


@pytest.mark.parametrize(("is_exhausted", "epoch_length"), [(True, 10), (False, None)])
def test_an_epoch_without_a_length_is_as_long_as_a_pass_that_has_reached_its_end(
    is_exhausted: bool, epoch_length: int | None
) -> None:
    loop = loop_over(Stream())
    loop.passes[0].is_exhausted = is_exhausted
    assert loop.epoch_length == epoch_length
    (row, *_) = try_loaders(loop)[0]
    assert (row.epoch_s is None) == (not is_exhausted)


def test_samples_that_fail_after_the_script_leave_rows_that_say_so() -> None:
    def closed(index: int) -> Tensor:
        raise RuntimeError("the pool is closed")

    rows, parts = try_loaders(loop_over(Made(closed)))
    assert parts == {}
    assert all("the pool is closed" in str(row.error) for row in rows)


@pytest.mark.parametrize(("cores", "threads"), [(0.0, 1), (0.6, 1), (1.0, 1), (1.9, 2), (1.4, 2)])
def test_an_imitated_step_takes_the_time_and_the_cores_of_the_scripts(cores: float, threads: int) -> None:
    """Processor time is compared, because other programs may use the cores."""
    step = ImitatedStep(0.02, cores)
    began, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(10):
        step(None)
    assert time.perf_counter() - began >= 10 * 0.02 * 0.5
    assert time.process_time() - cpu_s == pytest.approx(10 * 0.02 * cores, rel=0.5, abs=0.02)
    assert step.threads == threads


def test_the_time_of_a_sample_is_divided_and_transforms_stay_as_they_are() -> None:
    dataset = Transformed(slow, add_noise)
    parts = time_parts(DataLoader(torch.utils.data.Subset(dataset, range(8)), 4))
    assert [*parts] == ["decoding and reading", "slow", "add_noise", "collating"]
    assert parts["slow"] == max(parts.values())
    assert dataset.transform.transforms == [slow, add_noise]


def test_random_transforms_are_tried_on_tensors_too() -> None:
    rows, _ = try_loaders(loop_over(Transformed(slow, add_noise)))
    assert rows[-1].name == 'from_dataloader, transforms="tensor"'


def test_set_up_is_that_of_from_dataloader_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some samples are decoded, and reading them is the largest part."""
    monkeypatch.setattr("vitmnist.diagnosis.candidates.DECODING_S", 0.1)
    samples = Made(lambda index: slow(ones(index)), 800)
    candidate = build_replacement(DataLoader(samples, 4), LoaderCandidate(), "exact", 0.002)
    assert candidate.length < 800 / 4
    samples.reads = 0
    from_dataloader(DataLoader(samples, 4))
    assert candidate.set_up_s >= 0.4 * samples.reads * 0.002


@pytest.mark.parametrize(
    ("epoch_s", "set_up_s", "epochs", "expected"),
    [(0.5, 1.0, 9, "x"), (0.5, 1.0, 2, None), (0.9, None, 9, None), (0.5, 9.0, inf, "x"), (0.5, None, 1, "x")],
)
def test_a_change_is_named_if_the_epochs_of_the_script_pay_for_it(
    epoch_s: float, set_up_s: float | None, epochs: float, expected: str | None
) -> None:
    """An epoch takes a second now."""
    rows = [
        TimingRow("as it is", epoch_s=Spread.of([1.0])),
        TimingRow("x", None, Spread.of([epoch_s]), 0.0, set_up_s, 1, "x"),
    ]
    assert find_best_change([*rows, TimingRow("failed", error="why", change="y")], epochs) == expected
