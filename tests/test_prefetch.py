"""The background thread: it overlaps, it stops, and it hides nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from vitmnist.data.dataset import Dataset
from vitmnist.data.loaders.contract import Batches, Loader
from vitmnist.data.loaders.prefetch import PrefetchLoader, PrefetchOptions, Producer
from vitmnist.data.order import EpochOrder

BATCHES = 6


class Source(Loader):
    """Delivers numbered batches and raises where it is told to."""

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
    order = EpochOrder(BATCHES, 1, seed=0)
    loader = PrefetchLoader(PrefetchOptions(queue_size=2), tiny.train, order, torch.device("cpu"))
    loader.base = Source(order)
    return loader


def numbers(batches: Batches) -> list[int]:
    return [int(images) for images, _ in batches]


@pytest.mark.parametrize("fail_at", [0, 3, BATCHES - 1, BATCHES])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), SystemExit(3), KeyboardInterrupt()])
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
    assert numbers(prefetch.epoch(0)) == list(range(BATCHES))


def test_no_more_than_the_queue_is_made_ahead(prefetch: PrefetchLoader) -> None:
    batches = prefetch.epoch(0)
    next(batches)
    time.sleep(0.3)
    # One taken, two in the queue, one in the thread's hands.
    assert prefetch.base.made <= 4
    batches.close()


def test_a_thousand_abandoned_iterators_leave_no_thread(prefetch: PrefetchLoader) -> None:
    before = threading.active_count()
    for number in range(1000):
        for _, labels in prefetch.epoch(number):
            assert int(labels) == number
            break
    assert threading.active_count() == before


def test_a_consumer_that_raises_stops_the_thread(prefetch: PrefetchLoader) -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), prefetch:  # noqa: PT012
        for _ in prefetch.epoch(0):
            raise ZeroDivisionError
    assert threading.active_count() == before


def test_loading_and_computing_overlap(prefetch: PrefetchLoader) -> None:
    """While the consumer holds the first batch, the thread makes the next ones."""
    batches = prefetch.epoch(0)
    next(batches)
    deadline = time.monotonic() + 5
    while prefetch.base.made < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert prefetch.base.made >= 3
    batches.close()


def test_the_thread_leaves_the_cores_to_the_model(prefetch: PrefetchLoader) -> None:
    before, beside = torch.get_num_threads(), []
    prefetch.base.before_batch = {1: lambda: beside.append(torch.get_num_threads())}
    numbers(prefetch.epoch(0))
    assert beside == [1]
    assert torch.get_num_threads() == before


def test_closing_from_another_thread_ends_a_consumer_that_waits(prefetch: PrefetchLoader) -> None:
    blocked = threading.Event()
    prefetch.base.before_batch = {2: blocked.wait}
    seen = []
    consumer = threading.Thread(target=lambda: seen.extend(numbers(prefetch.epoch(0))))
    consumer.start()
    while prefetch.base.made < 2:
        time.sleep(0.01)
    prefetch.close()  # the base is amid a batch, which cannot be interrupted
    consumer.join(timeout=5)
    assert not consumer.is_alive()
    assert seen in ([], [0], [0, 1])
    blocked.set()
    assert numbers(prefetch.epoch(0)) == list(range(BATCHES))


def test_an_iterator_that_is_collected_in_its_own_thread_does_not_lock_it() -> None:
    """Python may run the `finally` of an abandoned iterator in any thread."""

    def source() -> Batches:
        producer.stop()
        yield torch.zeros(1), torch.zeros(1)

    producer = Producer(source, 1, None)
    producer._thread.start()
    producer._thread.join(timeout=5)
    assert not producer._thread.is_alive()


def test_the_interpreter_ends_at_once_under_a_live_iterator(tiny_root: Path) -> None:
    program = f"""
import torch
from vitmnist.data.dataset import load_dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.order import EpochOrder
split = load_dataset({{"name": "kmnist", "train_size": None, "test_size": None}}, {str(tiny_root)!r}).train
disk = {{"name": "disk", "num_workers": 1, "pin_memory": False, "prefetch_factor": 2, "persistent_workers": True}}
for base in (disk, {{"name": "ram"}}):
    options = {{"name": "prefetch", "queue_size": 1, "base": base}}
    batches = LOADERS.build(options, split, EpochOrder(23, 2, 0), torch.device("cpu")).epoch(0)
    next(batches)
    globals()["kept " + base["name"]] = batches
print("live", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "live\n", "")
