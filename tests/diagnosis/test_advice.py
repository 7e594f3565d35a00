"""Verdicts and advice follow from the figures."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.support.samples import Made
from vitmnist import from_dataloader
from vitmnist.diagnosis.advice import advise_on_loader, advise_on_script, why_late
from vitmnist.diagnosis.changes import Change, epoch_now, find_changes, loop_of
from vitmnist.diagnosis.epochs import Epoch, Loop
from vitmnist.diagnosis.observation import Source, new_observation
from vitmnist.diagnosis.trial import Trial, try_samples
from vitmnist.diagnosis.verdict import verdict
from vitmnist.runtime.cpu import Cores

IDLE = Cores(8, busy=1.0, workers=0.0)


class Epochs(Made):
    def set_epoch(self, epoch: int) -> None:
        """Changes the samples."""


def ones(index: int) -> Tensor:
    return torch.ones(3)


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


def loader_of(**changed: Any) -> dict[str, Any]:
    """Figures of a loader whose batches take 10 ms, which compute; 100 batches, 2 epochs of 50."""
    loader = {"num_workers": 0, "batch_size": 4, "persistent_workers": False, "num_loaders": 1, "start_method": "fork"}
    loader["are_rebuilt"] = True
    loader |= {"batches": 100, "batches_seen": 100, "passes": 2, "epochs": 2, "samples": 200, "is_iterable": False}
    times = {"waiting_s": 1.0, "waiting_cpu_s": 1.0, "waiting_pct": 83.0, "restarts_s": 0.0, "restarts_pct": 0.0}
    return {**loader, **times, "start_s": 0.1, **changed}


def script_of(loader: dict[str, Any], *, stopped: bool = True) -> dict[str, Any]:
    """The report on a script with this loader and a step of 2 ms."""
    script = {"work_s": 0.002, "seconds": 1.2, "command": "vitmnist diagnose mine.py", "rank": None, "stopped": stopped}
    return {**script, "waiting_s": 1.0, "waiting_pct": loader["waiting_pct"], "loaders": [loader]}


def advice_on(dataset: Any, kind: type = DataLoader, cores: Cores = IDLE, **changed: Any) -> list[str]:
    """What is said of a loader over a dataset, whose samples are read."""
    loader = loader_of(**changed)
    found = advise_on_loader(loader, script_of(loader), cores, Source(dataset, default_collate, {}, kind))
    return [advice["text"] for advice in found]


@pytest.mark.parametrize(
    ("changed", "cores", "expected", "most_workers"),
    [
        ({}, IDLE, "which takes 10.0 ms; cores are free (1.0 of 8 cores busy)", 5),
        ({}, Cores(2, 1.0, 0.0), "; cores are free (1.0 of 2 cores busy)", 2),
        ({}, Cores(2, 1.9, 0.0), "and hardly a core is free (1.9 of 2 cores busy)", 0),
        ({"waiting_cpu_s": 0.01}, Cores(2, 0.1, 0.0), "its samples wait rather than compute (0.1 of 2 cores busy)", 5),
        ({"waiting_cpu_s": 0.01, "batches": 10}, Cores(2, 0.1, 0.0), "its samples wait rather than compute", 8),
        ({"num_workers": 2}, Cores(2, 0.1, 0.05), "its samples wait rather than compute (0.1 of 2 cores busy)", 8),
        ({"num_workers": 2}, Cores(8, 2.5, 2.0), "step of 2.0 ms; cores are free (2.5 of 8 cores busy)", 8),
        ({"num_workers": 2}, Cores(2, 2.0, 1.8), "and hardly a core is free (2.0 of 2 cores busy)", 0),
        (
            {"num_workers": 2, "waiting_cpu_s": 0.01},
            Cores(2, 0.3, workers=0.1, others=1.6),
            "step of 2.0 ms, and hardly a core is free (0.3 of 2 cores busy, 1.6 more by other processes); stop",
            0,
        ),
        ({"num_workers": 2, "restarts_pct": 70.0}, IDLE, "the starts and ends of epochs take 70% of the time", 0),
    ],
)
def test_workers_may_help_where_cores_are_free_or_samples_wait(
    changed: dict[str, Any], cores: Cores, expected: str, most_workers: int
) -> None:
    loader = loader_of(**changed)
    reason, most = why_late(loader, script_of(loader), cores)
    assert expected in reason
    assert most == most_workers


def test_a_loader_for_which_the_script_hardly_waits_gets_no_advice() -> None:
    assert not advice_on(Made(ones), waiting_pct=9.0)


def test_samples_are_read_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert advice_on(Made(lambda index: print("reading") or ones(index)))  # type: ignore[func-returns-value]
    assert not capsys.readouterr().out


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


class Endless(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("dataset", "kind", "reason"),
    [
        (Made(lambda index: torch.rand(3)), DataLoader, "apart from the transforms"),
        (Epochs(ones), DataLoader, "set_epoch"),
        (Stream(), DataLoader, "IterableDataset"),
        (Made(ones), Endless, "Endless iterates in its own way; give a plain DataLoader"),
    ],
)
def test_decoding_once_is_not_advised_where_it_would_be_refused(dataset: Any, kind: type, reason: str) -> None:
    (text,) = advice_on(dataset, kind, is_iterable=isinstance(dataset, Stream))
    assert "use vitmnist.from_dataloader" not in text
    assert "vitmnist.from_dataloader refuses this loader: " in text
    assert reason in text


@pytest.mark.parametrize(
    ("once_s", "part", "epochs", "is_shared", "expected"),
    [
        ((1.5, 1.5), 0.5, 9, False, "epoch 3 to 4"),  # the estimate errs by 15%: 2.6 to 3.5 epochs
        ((1.2, 1.2), 0.5, 9, False, "epoch 3"),
        ((1.2, 2.4), 0.5, 9, False, "epoch 3 to 6"),
        ((0.1, 0.1), 0.5, 9, False, "epoch 1"),
        ((1.5, 1.5), 0.5, 3, False, None),  # it may lose
        ((1.2, 1.2), 0.5, 3, False, None),  # it gains too little
        ((0.0, 0.0), 0.9, 9, False, None),
        ((1.5, 1.5), 0.5, math.inf, False, "epoch 3 to 4"),  # of a script that was stopped
        ((1.2, 1.2), 0.5, 9, True, "epoch 1 to 5"),  # other programs use the cores: it may take twice as long
        ((1.2, 1.2), 0.5, 4, True, None),
    ],
)
def test_a_change_is_advised_if_the_epochs_of_the_script_pay_for_it(
    once_s: tuple[float, float], part: float, epochs: float, is_shared: bool, expected: str | None
) -> None:
    """Of epochs that take a second now."""
    assert Change("{epochs}", once_s, part).advice(1.0, epochs, is_shared=is_shared) == expected


PERSISTENT = "persistent_workers=True, which keeps the workers from one epoch to the next (what is shuffled"
DECODED = "use vitmnist.from_dataloader(loader), which decodes once and gives the same batches: 0.6 s at the start and "
DECODED += "1.0 MiB of memory, which pay from epoch 2 on"


@pytest.mark.parametrize(
    ("changed", "epochs_by_workers", "expected"),
    [
        # An epoch of the script: 50 batches of 12 ms, which take 0.6 s.
        ({}, {0: (0.0, 0.6), 5: (0.1, 0.2)}, ["try num_workers=5"]),
        ({}, {0: (0.0, 0.6), 5: (0.4, 0.2)}, ["try num_workers=5 with persistent_workers=True, as"]),
        ({"epochs": 1, "batches_seen": 50}, {0: (0.0, 0.6), 5: (0.4, 0.2)}, []),
        ({}, {0: (0.0, 0.6), 5: (0.1, 0.5)}, []),
        ({}, {0: (0.0, 0.6)}, []),  # 5 workers fail
        ({"start_method": "spawn"}, {0: (0.0, 0.6), 5: (0.1, 0.2)}, []),  # their start is not measured
        ({"is_iterable": True}, {0: (0.0, 0.6), 5: (0.1, 0.2)}, []),  # reading it may take what the script needs
        ({"num_workers": 2}, {2: (0.3, 0.3), 0: (0.0, 0.4)}, ["try num_workers=0"]),
        ({"num_workers": 2, "restarts_s": 0.9}, {2: (0.4, 0.2)}, [f"try {PERSISTENT}"]),
        ({"num_workers": 2, "restarts_s": 0.9, "start_method": "spawn"}, {}, [f"try {PERSISTENT}"]),
        ({"num_workers": 2, "restarts_s": 0.9, "persistent_workers": True}, {2: (0.4, 0.2)}, []),
        ({"num_workers": 2, "restarts_s": 0.1}, {2: (0.05, 0.55)}, []),
        (
            {"num_workers": 2, "restarts_s": 0.9, "num_loaders": 3},
            {2: (0.4, 0.2)},
            [f"build the DataLoader once, before the epochs, with {PERSISTENT}"],
        ),
    ],
)
def test_workers_are_advised_where_their_epochs_are_shorter_with_their_starts(
    changed: dict[str, Any],
    epochs_by_workers: dict[int, tuple[float, float]],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = changes_of(changed, epochs_by_workers, Trial(), monkeypatch)
    assert len(found) == len(expected)
    for text, begin in zip(found, expected, strict=True):
        assert text.startswith(begin)


def changes_of(
    changed: dict[str, Any],
    epochs_by_workers: dict[int, tuple[float, float]],
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """What is advised where epochs take these times: the start of the workers, and the rest."""

    def epoch(loop: Loop, dataset: Any, collate: Any, workers: int) -> Epoch | None:
        times = (0.0, 0.1) if dataset == "decoded" else epochs_by_workers.get(workers)
        return Epoch(*times) if times else None

    monkeypatch.setattr(Loop, "epoch", epoch)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])  # tests may have left others
    loader = loader_of(**changed)
    loop = loop_of(loader, script_of(loader), IDLE)
    source = Source(Made(ones), default_collate, {}, DataLoader)
    now_s = epoch_now(loader, loop).seconds
    found = find_changes(loader, loop, source, trial, 0 if loader["num_workers"] else 5, import_s=0.1)
    return [text for one in found if (text := one.advice(now_s, loader["epochs"]))]


@pytest.mark.parametrize(
    ("set_up_s", "timed_s", "expected"),
    [
        ((0.5, 0.5), 0.6, DECODED),
        ((0.5, 0.5), 0.3, DECODED.replace("2 on", "2 to 4 on")),  # when it was timed, the machine was twice as fast
        ((0.5, 1.1), 0.6, DECODED.replace("0.6 s", "1.2 s").replace("2 on", "2 to 3 on")),
        ((5.0, 5.0), 0.6, None),
        ((math.inf, math.inf), 0.6, None),
    ],
)
def test_set_up_pays_from_the_epochs_that_follow_from_what_was_measured(
    set_up_s: tuple[float, float], timed_s: float, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = SimpleNamespace(dataset="decoded", collate_fn=None, num_workers=0)
    trial = Trial(set_up_s=set_up_s, memory_bytes=2**20, method="decodes once", replaced=replaced)
    found = changes_of({"epochs": 9, "batches_seen": 450}, {0: (0.0, timed_s)}, trial, monkeypatch)
    assert found == ([expected] if expected else [])


def test_an_epoch_now_is_that_of_the_script_with_its_restarts() -> None:
    loader = loader_of(num_workers=2, restarts_s=0.51, passes=2)
    loop = loop_of(loader, script_of(loader), IDLE)
    assert (loop.batches, loop.work_s) == (50, 0.002)
    assert epoch_now(loader, loop) == Epoch(0.255, pytest.approx(50 * (0.49 / 98 + 0.002)))
    stopped = loader_of(epochs=1, batches_seen=60, samples=4000, passes=0)
    loop = loop_of(stopped, script_of(stopped), IDLE)
    assert loop.batches == 1000
    assert epoch_now(stopped, loop).start_s == 0.1  # of the warm-up


class Slept(Made):
    """Reading a sample takes 5 ms, its random transform none."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda index: torch.ones(3 + index % 7 * (kind == "kept")), 80)
        self.transform = RandomShift() if kind == "random" else None

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.005)
        sample = super().__getitem__(index)
        return self.transform(sample) if self.transform else sample


class RandomShift:
    def __call__(self, sample: Tensor) -> Tensor:
        return sample + torch.rand(1)


def collate(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("plain", "decodes once"),
        ("random", "decodes what is not random once"),
        ("kept", "decodes once and collates each time"),
    ],
)
def test_set_up_is_that_of_from_dataloader(kind: str, method: str) -> None:
    """Of which reading is the largest part; the machine may be slower than that."""
    samples = Slept(kind)
    loop = Loop(batches=5, batch_size=16, work_s=0.0, cores=0.0)
    trial = try_samples(Source(samples, collate, {"batch_size": 16}, DataLoader), loader_of(batch_size=16), loop)
    assert (trial.refused, trial.method) == (None, method)
    samples.reads = 0
    from_dataloader(DataLoader(samples, 16, collate_fn=collate))
    assert trial.set_up_s[0] >= 0.9 * samples.reads * 0.005
    assert trial.parts["collate"] < 0.005 < sum(trial.parts.values())


def test_a_batch_sampler_of_the_script_is_tried_as_one() -> None:
    loader = DataLoader(Slept("plain"), batch_sampler=[[0, 1], [2, 3, 4]])
    source = new_observation(loader).source
    assert source is not None
    assert try_samples(source, loader_of(batch_size=None), Loop(2, 2, work_s=0.0, cores=0.0)).refused is None


def test_spawned_workers_take_their_measured_start_to_decode() -> None:
    source = Source(Slept("plain"), default_collate, {}, DataLoader)
    loader = loader_of(num_workers=2, start_method="spawn", start_s=7.0)
    trial = try_samples(source, loader, loop_of(loader, script_of(loader), IDLE))
    assert trial.set_up_s[1] > trial.set_up_s[0] > 7
    source = Source(Slept("random"), default_collate, {}, DataLoader)
    trial = try_samples(source, loader, loop_of(loader, script_of(loader), IDLE))
    assert trial.set_up_s[0] == math.inf  # each epoch would start them, too


def test_a_short_epoch_has_the_start_of_workers_and_the_batches_of_all_of_them() -> None:
    """Where the step waits; batches of 16 samples of 5 ms."""
    loop = Loop(batches=10, batch_size=16, work_s=0.01, cores=0.0)
    alone, together = (loop.epoch(Slept("plain"), default_collate, workers) for workers in (0, 2))
    assert alone.rest_s >= 10 * (16 * 0.005 + 0.01)
    assert together.start_s > 0
    assert together.rest_s >= 10 * 16 * 0.005 / 2


def test_a_short_epoch_of_samples_that_fail_is_unknown() -> None:
    assert Loop(1, 2, 0.0, 0.0).epoch([], default_collate, 0) is None
