"""The background thread: it overlaps, it stops, and it hides nothing."""

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

from tests.support.processes import REPOSITORY, becomes_true
from tests.support.samples import Made, Pairs
from vitmnist import make_loader
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import Batches, Loader
from vitmnist.loaders.prefetch import PrefetchLoader, PrefetchOptions

BATCHES = 6


class Source(Loader):
    """Delivers numbered batches and raises at a given batch."""

    fail_at: int | None = None
    error: BaseException = OSError("the disk is gone")
    made = 0
    before_batch: ClassVar[dict[int, Callable[[], object]]] = {}

    def batches(self, number: int, start: int) -> Batches:
        for index in range(start, BATCHES + 1):
            if index == self.fail_at:
                raise self.error
            if index < BATCHES:
                self.before_batch.get(index, int)()
                self.made += 1
                yield torch.full((1,), index), torch.full((1,), number)


@pytest.fixture
def prefetch(tiny: Dataset) -> PrefetchLoader:
    sampler = EpochSampler(BATCHES, 1, seed=0)
    loader = PrefetchLoader(PrefetchOptions(queue_size=2), tiny.train, sampler, torch.device("cpu"))
    loader.base = Source(sampler)
    return loader


def numbers(batches: Batches) -> list[int]:
    return [int(images) for images, _ in batches]


@pytest.mark.parametrize("fail_at", [0, 3, BATCHES])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), SystemExit(3)])
def test_an_exception_arrives_where_its_batch_would_have(
    prefetch: PrefetchLoader, fail_at: int, error: BaseException
) -> None:
    prefetch.base.fail_at, prefetch.base.error = fail_at, error
    seen = []
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        for images, _ in prefetch.epoch(0):
            seen.append(int(images))
    assert seen == list(range(fail_at))
    assert caught.value is error
    assert "raise self.error" in "".join(traceback.format_tb(caught.value.__traceback__))
    prefetch.base.fail_at = None
    assert numbers(prefetch.epoch(1)) == list(range(BATCHES))


def test_the_thread_leaves_the_cores_to_the_model(prefetch: PrefetchLoader) -> None:
    before, inside = torch.get_num_threads(), []
    prefetch.base.before_batch = {1: lambda: inside.append(torch.get_num_threads())}
    torch.set_num_threads(2)  # this holds for new threads too
    try:
        numbers(prefetch.epoch(0))
        assert (inside, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "vitmnist-map"]


def test_leaving_a_source_that_blocks_takes_a_second_at_most(prefetch: PrefetchLoader) -> None:
    """The consumer continues although the thread cannot be ended."""
    assert becomes_true(lambda: not prefetching())
    requested, blocked = threading.Event(), threading.Event()
    prefetch.base.before_batch = {1: lambda: requested.set() or blocked.wait()}
    batches = prefetch.epoch(0)
    next(batches)
    assert requested.wait(10)
    batches.close()
    assert len(prefetching()) == 1
    blocked.set()
    assert becomes_true(lambda: not prefetching())


PROGRAM = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
import torch
from tests.support.samples import Made
from vitmnist import make_loader

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds that a blocked worker has to end

def block_at_4(index):
    if index == 4:
        print("blocked", flush=True)
        threading.Event().wait()
    time.sleep(0.01)
    return index, index

if __name__ == "__main__":
    loader = make_loader("prefetch", Made(block_at_4, 10), batch_size=2, device="cpu", seed=0, shuffle="none",
                         base={"name": "disk", "num_workers": 1})
    for epoch in range(10_000):
        for batch in loader.epoch(epoch):
            print("batch", flush=True)
"""


@pytest.mark.needs("POSIX signals")
def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    """The program ends while its source blocks for ever, and no worker survives."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    # A terminal sends Ctrl-C to the whole group, workers included.
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "program.py"], start_new_session=True, env=environment, **pipes
    )
    while "blocked" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    # At its end, Python stops a blocked thread by pthread_exit, which the C++ code of torch may report as a crash.
    assert process.returncode in (-signal.SIGINT, 1, -signal.SIGABRT), errors
    assert "KeyboardInterrupt" in errors
    assert becomes_true(lambda: not group_lives(process.pid))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Point(NamedTuple):
    x: torch.Tensor
    name: str


def nested(index: int) -> dict[str, object]:
    """A sample of a detection dataset."""
    boxes = [torch.tensor([index, index]), torch.tensor([-index])]
    return {"boxes": boxes, "point": Point(torch.tensor(index), f"point {index}"), "pair": (index, "")}


def test_nested_samples_pass_through() -> None:
    sampler = {"batch_size": 2, "device": "cpu", "seed": 0, "shuffle": "none"}
    with make_loader("prefetch", Made(nested, 3), base={"name": "disk", "num_workers": 0}, **sampler) as loader:
        batch, short = loader.epoch(0)
    assert [array.tolist() for array in batch["boxes"]] == [[[0, 0], [1, 1]], [[0], [-1]]]
    assert (batch["point"].x.tolist(), batch["point"].name) == ([0, 1], ("point 0", "point 1"))
    assert (batch["pair"][0].tolist(), short["pair"][0].tolist()) == ([0, 1], [2])


def test_prefetch_wraps_disk_for_samples_and_ram_for_tensors() -> None:
    options = {"batch_size": 4, "device": "cpu", "seed": 0}
    pair = torch.arange(10), torch.arange(10)
    with make_loader("prefetch", Pairs(), **options) as samples, make_loader("prefetch", pair, **options) as tensors:
        assert type(samples.base).__name__ == "WorkerLoader"
        assert type(tensors.base).__name__ == "RamLoader"
