"""Alternatives to a loader of a script, with a step that is imitated."""

from __future__ import annotations

import time
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.support.samples import Made
from vitmnist import from_dataloader
from vitmnist.diagnosis import candidates
from vitmnist.diagnosis.candidates import ImitatedStep, best_change, decode_part, time_parts, try_loaders
from vitmnist.diagnosis.observer import LoaderInfo, Loop, Pass
from vitmnist.timing.table import Row, Spread, format_rows


def ones(index: int) -> Tensor:
    return torch.ones(3)


class Epochs(Made):
    def set_epoch(self, epoch: int) -> None:
        """Changes the samples."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


class Transformed(Made):
    def __init__(self, *transforms: Any) -> None:
        super().__init__(ones)
        self.transform = Compose(list(transforms))

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(super().__getitem__(index))


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Tensor) -> Tensor:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def slow(sample: Tensor) -> Tensor:
    time.sleep(0.002)
    return sample


def add_noise(sample: Tensor) -> Tensor:
    return sample + torch.rand(3)


def loop_over(dataset: Any, **options: Any) -> Loop:
    """A loop of a script over 10 batches, with a step of 1 ms."""
    loader = DataLoader(dataset, 4, **options)
    passes = [Pass(0.0, 1.0, object, batches=10, is_exhausted=True)]
    return Loop(LoaderInfo("Made", 40, 4, 0, "mine.py:1"), loader, passes=passes, batches=10, steps_s=[0.001])


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Made(lambda index: torch.rand(3)), "(it draws from torch) apart from the transforms"),
        (Epochs(ones), "set_epoch"),
        (Stream(), "IterableDataset"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why(dataset: Any, reason: str) -> None:
    rows, _ = try_loaders(loop_over(dataset))
    errors = {row.name: row.error for row in rows}
    assert errors["as it is"] is None
    assert reason in str(errors["from_dataloader"])
    assert format_rows(rows).endswith(f"\nfrom_dataloader  {errors['from_dataloader']}")


@pytest.mark.parametrize(("is_exhausted", "epoch_length"), [(True, 10), (False, None)])
def test_an_epoch_without_a_length_is_as_long_as_a_pass_that_has_reached_its_end(
    is_exhausted: bool, epoch_length: int | None
) -> None:
    loop = loop_over(Stream())
    loop.passes[0].is_exhausted = is_exhausted
    assert loop.epoch_length == epoch_length
    (row, *_) = try_loaders(loop)[0]
    assert (row.epoch_s is None) == (not is_exhausted)


def test_samples_that_fail_after_the_script_and_print_leave_rows_that_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def closed(index: int) -> Tensor:
        print("reading")
        raise RuntimeError("the pool is closed")

    rows, parts = try_loaders(loop_over(Made(closed)))
    assert parts == {}
    assert all("the pool is closed" in str(row.error) for row in rows)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("cores", "threads"), [(0.0, 1), (0.6, 1), (1.0, 1), (1.9, 2), (1.4, 2)])
def test_an_imitated_step_takes_the_time_and_the_cores_of_the_scripts(cores: float, threads: int) -> None:
    """By the processor time, because the clock goes on while other programs use the cores."""
    step = ImitatedStep(0.02, cores)
    began, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(10):
        step(None)
    assert time.perf_counter() - began >= 10 * 0.02 * 0.5
    assert time.process_time() - cpu_s == pytest.approx(10 * 0.02 * cores, rel=0.5, abs=0.02)
    assert step.threads == threads


def test_the_time_of_a_sample_is_divided_and_transforms_stay_as_they_are() -> None:
    dataset = Transformed(slow, add_noise)
    parts, is_random = time_parts(DataLoader(torch.utils.data.Subset(dataset, range(8)), 4))
    assert [*parts] == ["decoding and reading", "slow", "add_noise", "collating"]
    assert parts["slow"] == max(parts.values())
    assert is_random
    assert dataset.transform.transforms == [slow, add_noise]
    assert not time_parts(DataLoader(Transformed(slow)))[1]


def test_set_up_is_that_of_from_dataloader_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which only some are decoded; reading them is the largest part."""
    monkeypatch.setattr("vitmnist.diagnosis.candidates.DECODE_S", 0.1)
    samples = Made(lambda index: slow(ones(index)), 800)
    replaced, set_up_s = decode_part(DataLoader(samples, 4), "exact", 0.002)
    assert len(replaced.dataset) < 100  # type: ignore[arg-type]
    samples.reads = 0
    from_dataloader(DataLoader(samples, 4))
    assert set_up_s >= 0.4 * samples.reads * 0.002


@pytest.mark.parametrize(
    ("epoch_s", "set_up_s", "epochs", "expected"),
    [(0.5, 1.0, 9, "x"), (0.5, 1.0, 2, None), (0.9, None, 9, None), (0.5, 9.0, inf, "x"), (0.5, None, 1, "x")],
)
def test_a_change_is_named_if_the_epochs_of_the_script_pay_for_it(
    epoch_s: float, set_up_s: float | None, epochs: float, expected: str | None
) -> None:
    """Of epochs that take a second now."""
    rows = [Row("as it is", epoch_s=Spread.of([1.0])), Row("x", None, Spread.of([epoch_s]), 0.0, set_up_s, 1, "x")]
    assert best_change([*rows, Row("failed", error="why", change="y")], epochs) == expected


class Opened(Made):
    def open(self) -> None:
        """Opens a file in each worker, as torch's documentation shows."""


def open_in_worker(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.open()


def test_a_part_of_a_dataset_has_its_attributes_in_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "DECODE_S", 0.0)
    loader = DataLoader(Opened(ones, 100), 4, num_workers=1, worker_init_fn=open_in_worker)
    replaced, _ = decode_part(loader, "exact", 1.0)
    assert (len(replaced.dataset), len(list(replaced))) == (32, 8)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [*range(40)]}])
def test_a_part_keeps_the_workers_that_the_whole_would_keep(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "DECODE_S", 0.0)
    loader = DataLoader(Transformed(slow, add_noise), 4, num_workers=2, **options)
    whole, (part, _) = from_dataloader(loader), decode_part(loader, "exact", 1.0)
    assert (part.num_workers, type(part)) == (whole.num_workers, type(whole))
