"""Loaders with workers and threads release them, however an epoch ends."""

import gc
import multiprocessing
import threading

import pytest
import torch

from tests.support.processes import run_python
from vitmnist import make_loader
from vitmnist.auditing import find_leftovers, find_running

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
