"""Verdicts and advice follow from the figures."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from vitmnist import from_dataloader
from vitmnist.diagnosis import trial
from vitmnist.diagnosis.advice import advise_on_loader, advise_on_script
from vitmnist.diagnosis.verdict import verdict
from vitmnist.runtime.cpu import Cores

IDLE = Cores(8, busy=1.0, workers=0.0)


class Samples(Dataset[Any]):
    def __init__(self, *, is_random: bool = False) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        print("reading", index)
        return torch.rand(3) if self.is_random else torch.ones(3)


SLEPT_S = 0.005


class Sleeping(Samples):
    """Counts what is read; nothing is random."""

    read = 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        time.sleep(SLEPT_S)
        return torch.ones(3)


class Epochs(Samples):
    def set_epoch(self, epoch: int) -> None:
        """Changes the samples."""


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (IDLE, "the loader is not the problem"),
        (Cores(2, busy=1.9, workers=0.0), "the loader is not the problem"),  # no process takes anything from the step
        (Cores(2, 0.9, workers=0.5, others=0.9), "0.9 of 2 cores busy, 0.9 more by other processes"),
        (
            Cores(2, busy=1.9, workers=0.9),
            "hardly a core is free (1.9 of 2 cores busy), and workers use 0.9: measure the step",
        ),
    ],
)
def test_a_loader_that_competes_with_the_step_may_be_the_problem(cores: Cores, expected: str) -> None:
    (advice,) = advise_on_script(2.0, cores)
    assert expected in advice["text"]
    assert verdict(2.0, 20, cores).startswith("compute-bound") == ("not the problem" in expected)
    assert not advise_on_script(10.0, cores)


def advice_on(
    changed: dict[str, Any], cores: Cores, dataset: Any = None, kind: type = DataLoader, *, stopped: bool = True
) -> list[str]:
    """Advice on a loader whose batches take 10 ms, which compute, and a step of 2 ms; 100 batches."""
    loader = {"num_workers": 0, "batch_size": 4, "persistent_workers": False, "num_loaders": 1, "batches": 100}
    loader |= {"batches_seen": 10_000, "passes": 2, "samples": 40, "start_method": "fork", "is_iterable": False}
    times = {
        "waiting_s": 1.0,
        "waiting_cpu_s": 1.0,
        "waiting_pct": 83.0,
        "restarts_s": 0.0,
        "restarts_pct": 0.0,
    }
    figures = {**loader, **times, "epochs": 2, **changed}
    script = {"work_s": 0.002, "seconds": 1.2, "command": "vitmnist diagnose mine.py", "rank": None, "stopped": stopped}
    script |= {"waiting_s": 1.0, "waiting_pct": figures["waiting_pct"], "loaders": [figures]}
    found = advise_on_loader(figures, script, cores, (dataset or Samples(), default_collate, kind))
    return [advice["text"] for advice in found]


@pytest.mark.parametrize(
    ("changed", "cores", "expected"),
    [
        ({}, IDLE, "or try num_workers=5, since cores are free (1.0 of 8 cores busy)"),
        ({}, Cores(2, 1.0, 0.0), "try num_workers=2, since cores are free (1.0 of 2 cores busy)"),
        ({}, Cores(2, 1.9, 0.0), "and hardly a core is free (1.9 of 2 cores busy); use vitmnist"),
        ({"batches": 5000}, IDLE, "takes 0.2 ms, less than a worker needs to hand it over"),
        (
            {"waiting_cpu_s": 0.01},
            Cores(2, 0.1, 0.0),
            "its samples wait rather than compute (0.1 of 2 cores busy); use",
        ),
        ({"waiting_cpu_s": 0.01, "batches": 10}, Cores(2, 0.1, 0.0), "try num_workers=8"),
        ({"num_workers": 2}, Cores(2, 0.1, 0.05), "its samples wait rather than compute (0.1 of 2 cores busy); use"),
        ({"num_workers": 2}, Cores(2, 0.1, 0.05), "try num_workers=8"),
        ({"num_workers": 2}, Cores(8, 2.5, 2.0), "or try num_workers=8, since cores are free (2.5 of 8 cores busy)"),
        ({"num_workers": 2}, Cores(2, 2.0, 1.8), "and hardly a core is free (2.0 of 2 cores busy); use vitmnist"),
        ({"num_workers": 4}, Cores(8, 1.5, 0.6), "although the 4 workers use only 0.6 cores: handing it over"),
        ({"num_workers": 4}, Cores(8, 1.5, 0.6), "compare num_workers=0 and num_workers=8"),
        (
            {"num_workers": 2, "waiting_cpu_s": 0.01},
            Cores(2, 0.3, workers=0.1, others=1.6),
            "step of 2.0 ms, and hardly a core is free (0.3 of 2 cores busy, 1.6 more by other processes); stop",
        ),
        ({"num_workers": 8}, Cores(8, 5.0, 4.5), "cannot keep up with the step of 2.0 ms; use vitmnist.from_dataload"),
    ],
)
def test_workers_are_advised_where_cores_are_free_or_samples_wait(
    changed: dict[str, Any], cores: Cores, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = advice_on(changed, cores)
    assert expected in text
    assert not capsys.readouterr().out  # of the samples that `from_dataloader` has been asked with
    assert not advice_on({**changed, "waiting_pct": 9.0}, cores)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Samples(is_random=True), "is random apart from the transforms"),
        (Epochs(), "set_epoch"),
        (Stream(), "IterableDataset"),
    ],
)
def test_decoding_once_is_not_advised_where_it_would_be_refused(dataset: Any, reason: str) -> None:
    (text,) = advice_on({}, IDLE, dataset)
    assert "use vitmnist.from_dataloader" not in text
    assert "vitmnist.from_dataloader refuses this loader: " in text
    assert reason in text


def test_decoding_once_is_not_advised_for_a_loader_with_an_iteration_of_its_own() -> None:
    class Endless(DataLoader):
        def __iter__(self) -> Any:
            return super().__iter__()

    (text,) = advice_on({}, IDLE, kind=Endless)
    assert "use vitmnist.from_dataloader" not in text
    assert "vitmnist.from_dataloader refuses this loader: " in text
    assert "Endless iterates in its own way; give a plain DataLoader" in text


PERSISTENT = "persistent_workers=True, which keeps the workers from one epoch to the next (what is shuffled"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, f"the starts and ends of epochs take 70% of the time; try {PERSISTENT}"),
        ({"num_loaders": 3}, f"of the time; build the DataLoader once, before the epochs, with {PERSISTENT}"),
        ({"persistent_workers": True}, "the starts and ends of epochs take 70% of the time; vitmnist"),
        ({"restarts_pct": 8.0, "restarts_s": 0.1}, f", or try {PERSISTENT}"),
    ],
)
def test_workers_that_stay_are_advised_where_their_starts_take_noticeable_time(
    changed: dict[str, Any], expected: str
) -> None:
    restarts = {"num_workers": 2, "restarts_s": 0.9, "restarts_pct": 70.0, **changed}
    (text,) = advice_on(restarts, IDLE, Samples(is_random=True))
    assert expected in text
    (text,) = advice_on(restarts, IDLE)  # whose replacement has no workers
    assert "use vitmnist.from_dataloader(loader), which" in text
    assert "persistent_workers" not in text


class Transformed(Samples):
    """Reading a sample takes 20 ms, its random transform none."""

    def __init__(self) -> None:
        self.transform = RandomShift()

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.02)
        return self.transform(torch.ones(3))


class RandomShift:
    def __call__(self, sample: Tensor) -> Tensor:
        return sample + torch.rand(1)


def test_decoding_once_is_not_advised_against_restarts_that_the_replacement_has_too() -> None:
    restarts = {"num_workers": 2, "restarts_s": 0.9, "restarts_pct": 70.0}
    (text,) = advice_on(restarts, IDLE, Transformed())
    assert f"the starts and ends of epochs take 70% of the time; try {PERSISTENT}" in text
    assert "from_dataloader" not in text


def test_decoding_once_is_advised_for_random_transforms_with_what_it_saves() -> None:
    (text,) = advice_on({}, IDLE, Transformed())
    assert (
        "use vitmnist.from_dataloader(loader), which decodes what is not random once and gives the same batches" in text
    )
    assert " MiB of memory, which pay from epoch 1 on" in text
    few = {"epochs": 2, "batches_seen": 20, "samples": None}
    assert "which pay from epoch 2 on" not in "".join(advice_on(few, IDLE, Transformed(), stopped=False))


@pytest.mark.parametrize(
    ("epoch_batches", "start_s", "epochs", "expected"),
    [
        (100, 0.1, 2, "try num_workers=5, since"),
        (20, 0.15, 9, "try num_workers=5 with persistent_workers=True, as starting them takes 0.15 s, since"),
        (20, 0.15, 1, None),
        (20, 3.0, 9, None),
    ],
)
def test_workers_are_advised_if_they_save_more_than_their_start_takes(
    epoch_batches: int, start_s: float, epochs: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "worker_start_s", lambda workers, start_method: start_s)
    seen = {"epochs": epochs, "batches_seen": epochs * epoch_batches, "samples": None}
    (text,) = advice_on(seen, IDLE, Samples(is_random=True), stopped=False)
    assert (expected or "which takes 10.0 ms; vitmnist") in text
    assert ("num_workers" in text) == bool(expected)


def test_set_up_is_that_of_from_dataloader() -> None:
    """As measured with a stopwatch, within what a busy machine adds."""
    samples = Sleeping()
    found = trial.try_samples(
        samples, default_collate, DataLoader, {"num_workers": 0, "start_method": "fork", "batch_size": 4}
    )
    assert found
    samples.read = 0
    from_dataloader(DataLoader(samples, 4))
    assert found.set_up_s >= 0.8 * samples.read * SLEPT_S
    assert not found.refused
    assert found.parts["reading and transforms"] > SLEPT_S > found.parts["collate"]
