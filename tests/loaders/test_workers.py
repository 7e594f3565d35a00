"""Workers and threads deliver the same batches, are released, and end in seconds with an error that names them."""

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.processes import becomes_true, run_python, start_method
from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.auditing import find_leftovers, find_running
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import DataError, LoadingError

DISK = {"name": "disk", "num_workers": 1, "prefetch_factor": 2}
LOADERS = {
    "disk": DISK,
    "prefetch of disk": {"name": "prefetch", "base": DISK},
    "prefetch of ram": {"name": "prefetch", "base": "ram"},
}


def workers_and_threads() -> set[object]:
    """The workers and threads of loaders, without the threads by which multiprocessing feeds its queues."""
    threads = {thread for thread in threading.enumerate() if thread.name == "vitmnist-map"}
    return threads | set(multiprocessing.active_children())


@pytest.mark.parametrize("label", LOADERS)
def test_a_closed_or_abandoned_loader_leaves_no_threads_and_workers(label: str) -> None:
    before = find_running()
    pair = torch.arange(16), torch.arange(16)
    loader = make_loader(data=pair, batch_size=2, device="cpu", seed=1, **LOADERS[label])
    with pytest.raises(ZeroDivisionError), loader:  # noqa: PT012
        for _ in loader.epoch(1):
            raise ZeroDivisionError
    assert not workers_and_threads() - before
    assert len(list(loader.epoch(0))) == 8  # a closed loader can be used again
    for _ in loader.epoch(1):
        break
    gc.disable()  # the release must not depend on the garbage collector
    try:
        del loader
        assert not workers_and_threads() - before
    finally:
        gc.enable()
    assert not find_leftovers(before)


def test_the_interpreter_ends_under_a_live_iterator() -> None:
    program = """
import torch
from vitmnist import make_loader
pair = torch.arange(24), torch.arange(24)
disk = {"name": "disk", "num_workers": 1}
def loaders():
    return [make_loader(data=pair, batch_size=2, device="cpu", seed=0, **options)
            for options in (disk, {"name": "prefetch", "base": disk})]
ended, live = loaders(), [loader.epoch(0) for loader in loaders()]
print(sum(1 for loader in ended for batch in loader.epoch(0)), sum(1 for batches in live if next(batches)), flush=True)
"""
    ended = run_python("-c", program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "24 2\n", "")


def test_workers_of_a_forkserver_deliver_the_same_batches(tiny: Dataset) -> None:
    options = {"batch_size": 5, "device": "cpu", "seed": 1}
    with (
        start_method("forkserver"),
        make_loader("disk", tiny.train, num_workers=2, **options) as disk,
        make_loader("disk", tiny.train, num_workers=0, **options) as expected,
    ):
        for batch, expected_batch in zip(disk.epoch(3), expected.epoch(3), strict=True):
            assert all(map(torch.equal, batch, expected_batch))


Workers = Callable[[], "set[multiprocessing.Process]"]


@pytest.fixture
def workers() -> Workers:
    """The processes that have started since the test began; earlier tests may have left a pool."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def hang_at_5(index: int) -> tuple[int, int]:
    while index == 5:
        time.sleep(0.1)
    return index, index


HANGING = Made(hang_at_5, 8)
IN_ORDER = {"batch_size": 1, "device": "cpu", "seed": 0, "shuffle": "none"}


@pytest.mark.slow  # torch waits five seconds for a worker that does not end
def test_a_worker_that_hangs_is_an_error_in_seconds(workers: Workers) -> None:
    with (
        make_loader("disk", HANGING, num_workers=1, timeout_s=1.0, **IN_ORDER) as loader,
        pytest.raises(LoadingError, match=r"disk: DataLoader timed out.*data\.loader\.timeout_s"),
    ):
        list(loader.epoch(0))
    assert becomes_true(lambda: not workers())


def test_a_worker_that_is_killed_is_named_in_seconds(workers: Workers) -> None:
    loader = make_loader("disk", HANGING, num_workers=1, prefetch_factor=1, **IN_ORDER)
    with loader, pytest.raises(LoadingError, match=r"killed|exited unexpectedly") as caught:  # noqa: PT012
        for number, _ in enumerate(loader.epoch(0)):
            if number == 1:
                for worker in workers():
                    worker.kill()
    assert "set a smaller num_workers" in str(caught.value)
    assert not workers()


def test_samples_that_make_no_batch_are_refused_with_advice() -> None:
    samples = Made(lambda index: (torch.ones(index + 1), index), 4)
    with (
        make_loader("disk", samples, batch_size=2, device="cpu", seed=0, num_workers=0) as loader,
        pytest.raises(DataError, match=r"do not make a batch: .*same shape in a transform .* or use a DataLoader"),
    ):
        list(loader.epoch(0))
