"""The next epoch is begun early if their number is known: once, in time, and without a trace if it is not wanted."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import becomes_true, run_python
from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.auditing import left_since, running
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import Loader

SAMPLES, BATCH_SIZE = 16, 2
BATCHES = SAMPLES // BATCH_SIZE
DISK = {"name": "disk", "num_workers": 1, "prefetch_factor": 2}
LOADERS = {
    "disk": DISK,
    "prefetch of disk": {"name": "prefetch", "base": DISK},
    "prefetch of ram": {"name": "prefetch", "base": "ram"},
}
AHEAD = ["prefetch of disk", "prefetch of ram"]


class Recorded(Made):
    """Appends a byte to a file at each read, from any process; can fail at the first sample of epoch 1."""

    def __init__(self, file: Path, fails: bool = False) -> None:
        super().__init__(lambda index: (torch.rand(2), index), SAMPLES)
        self.file, self.fails = file, fails

    def __getitem__(self, index: int) -> Any:
        with self.file.open("ab") as opened:
            opened.write(b".")
        if self.fails and self.file.stat().st_size > SAMPLES:
            raise OSError("the disk is gone")
        return super().__getitem__(index)

    def batches_read(self) -> int:
        return self.file.stat().st_size // BATCH_SIZE if self.file.exists() else 0


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "reads")


def build(label: str, data: object, **options: object) -> Loader:
    settings = {"batch_size": BATCH_SIZE, "device": "cpu", "seed": 1, **LOADERS[label], **options}
    name = settings.pop("name")
    return make_loader(name, data, **settings)


def exhaust(loader: Loader, number: int, start: int = 0) -> int:
    return sum(1 for _ in loader.epoch(number, start))


def settled(count: Callable[[], int], expected: int) -> int:
    """The count, once it has arrived at what is expected, and had the time to go beyond."""
    becomes_true(lambda: count() >= expected)
    time.sleep(0.1)
    return count()


def workers_and_threads() -> set[object]:
    """Those of loaders, without the threads by which multiprocessing feeds its queues."""
    threads = {thread for thread in threading.enumerate() if thread.name == "vitmnist-map"}
    return threads | set(multiprocessing.active_children())


def test_the_next_epoch_is_begun_before_the_end_of_one_and_as_far_as_the_queue_goes(recorded: Recorded) -> None:
    with build("prefetch of disk", recorded, epochs=2) as loader:
        batches = loader.epoch(0)
        for _ in range(BATCHES):
            next(batches)
        assert settled(recorded.batches_read, BATCHES + 1) > BATCHES
        assert next(batches, None) is None
        assert settled(recorded.batches_read, BATCHES + loader.buffered) == BATCHES + loader.buffered < 2 * BATCHES
        assert exhaust(loader, 1) == BATCHES
        assert settled(recorded.batches_read, 2 * BATCHES) == 2 * BATCHES  # none twice, and none after the last epoch


def test_nothing_is_made_ahead_of_an_unknown_epoch(recorded: Recorded) -> None:
    with build("prefetch of disk", recorded) as loader:
        exhaust(loader, 0)
        assert settled(recorded.batches_read, BATCHES) == BATCHES


@pytest.mark.parametrize("call", [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("label", AHEAD)
def test_any_other_call_drops_what_was_begun(label: str, call: tuple[int, int]) -> None:
    pair = torch.arange(SAMPLES), torch.arange(SAMPLES)
    with build(label, pair, epochs=3) as loader:
        before = workers_and_threads()
        exhaust(loader, 0)
        begun = workers_and_threads() - before
        assert begun
        batches = loader.epoch(*call)
        next(batches)
        assert not begun & workers_and_threads()
        assert sum(1 for _ in batches) == BATCHES - call[1] - 1
        assert exhaust(loader, 1) == BATCHES


@pytest.mark.parametrize("end", ["close", "abandon", "raise", "break"])
@pytest.mark.parametrize("label", LOADERS)
def test_nothing_is_left(label: str, end: str) -> None:
    before = running()
    loader = build(label, (torch.arange(SAMPLES), torch.arange(SAMPLES)), epochs=9)
    exhaust(loader, 0)
    if end == "close":
        loader.close()
        assert not workers_and_threads() - before
        assert exhaust(loader, 1) == BATCHES  # a closed loader begins again
        loader.close()
    elif end == "raise":
        with pytest.raises(ZeroDivisionError), loader:  # noqa: PT012
            for _ in loader.epoch(1):
                raise ZeroDivisionError
    elif end == "break":
        for _ in loader.epoch(1):
            break
    gc.disable()  # nothing waits for the garbage collector
    try:
        del loader
        assert not workers_and_threads() - before
    finally:
        gc.enable()
    assert not left_since(before)


def test_an_error_of_the_next_epoch_is_not_raised_in_this_one(tmp_path: Path) -> None:
    before = running()
    with build("prefetch of disk", Recorded(tmp_path / "reads", fails=True), epochs=2) as loader:
        assert exhaust(loader, 0) == BATCHES
        with pytest.raises(OSError, match="the disk is gone"):
            exhaust(loader, 1)
    assert not left_since(before)


def test_the_interpreter_ends_under_a_live_iterator_and_an_epoch_that_was_begun() -> None:
    program = """
import torch
from vitmnist import make_loader
pair = torch.arange(24), torch.arange(24)
disk = {"name": "disk", "num_workers": 1}
def loaders():
    return [make_loader(data=pair, batch_size=2, device="cpu", seed=0, epochs=2, **options)
            for options in (disk, {"name": "prefetch", "base": disk})]
begun, live = loaders(), [loader.epoch(0) for loader in loaders()]
print(sum(1 for loader in begun for batch in loader.epoch(0)), sum(1 for batches in live if next(batches)), flush=True)
"""
    ended = run_python("-c", program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "24 2\n", "")


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
def test_a_number_of_epochs_that_is_none_is_refused(epochs: object) -> None:
    with pytest.raises(ConfigError, match=f"epochs={epochs}: must be "):
        build("disk", (torch.arange(SAMPLES), torch.arange(SAMPLES)), epochs=epochs)
