"""The contract that every registered loader keeps, and what single loaders promise."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.contract import check_contract
from tests.support.processes import becomes_true, start_method
from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import DataError, LoadingError
from vitmnist.loaders.base import LOADERS

GENERATOR = torch.Generator().manual_seed(0)
FLOATS = torch.randn(23, 3, generator=GENERATOR, dtype=torch.float64)
BYTES = torch.randint(0, 256, (23, 1, 3, 3), generator=GENERATOR, dtype=torch.uint8)
DATA = {
    "split": None,
    "pair of tensors": (FLOATS, torch.arange(46, dtype=torch.int16).view(23, 2)),
    "map-style dataset": TensorDataset(BYTES, torch.arange(23)),
}
BUILT_IN = {"ram", "gpu_slice", "cache", "disk", "auto", "prefetch"}
PLAIN = [
    {"name": "ram"},
    {"name": "gpu_slice"},
    {"name": "cache", "folder": "cache"},
    {"name": "disk", "num_workers": 0},
    *({"name": name} for name in sorted({*LOADERS.members()} - BUILT_IN)),
]
CASES = [
    *((options, data) for options in PLAIN for data in DATA),
    ({"name": "auto", "batches": 1, "candidates": ["gpu_slice", "ram"]}, "split"),
    ({"name": "prefetch"}, "split"),
    ({"name": "prefetch"}, "pair of tensors"),
    ({"name": "prefetch", "queue_size": 1, "base": "gpu_slice"}, "split"),
    ({"name": "prefetch", "base": {"name": "cache", "folder": "cache"}}, "map-style dataset"),
    # Starting processes takes most of the time, so each loader with workers is tested with one kind of data.
    ({"name": "disk", "num_workers": 2}, "pair of tensors"),
    ({"name": "prefetch", "base": {"name": "disk", "num_workers": 0}}, "map-style dataset"),  # It starts a worker.
]


@pytest.mark.parametrize(("options", "data"), CASES, ids=str)
def test_every_loader_meets_the_contract(
    options: dict[str, Any], data: str, tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_contract(data=DATA[data] or tiny.train, **options)


def test_workers_of_a_forkserver_deliver_the_same_batches(tiny: Dataset) -> None:
    options = {"batch_size": 5, "device": "cpu", "seed": 1}
    with (
        start_method("forkserver"),
        make_loader("disk", tiny.train, num_workers=2, **options) as disk,
        make_loader("disk", tiny.train, num_workers=0, **options) as expected,
    ):
        for batch, expected_batch in zip(disk.epoch(3), expected.epoch(3), strict=True):
            assert all(map(torch.equal, batch, expected_batch))


@pytest.mark.parametrize("name", ["disk", "ram", "cache"])
def test_only_gpu_slice_takes_tensors_on_a_device(name: str) -> None:
    there = torch.zeros(23, 3, device="meta")
    with pytest.raises(DataError, match="the tensors are on meta, not in host memory; gpu_slice leaves them there"):
        make_loader(name, (there, there), batch_size=5, device="cpu", seed=0)


@pytest.mark.parametrize("name", ["ram", "gpu_slice"])
def test_contiguous_batches_are_views(tiny: Dataset, name: str) -> None:
    inside = range(tiny.train.images.data_ptr(), tiny.train.images.data_ptr() + tiny.train.images.numel())
    with make_loader(name, tiny.train, batch_size=5, device="cpu", seed=1, shuffle="batch") as loader:
        assert all(images.data_ptr() in inside for images, _ in loader.epoch(0))


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


def test_integers_of_numpy_are_integers() -> None:
    pair = torch.arange(6), torch.arange(6)
    with make_loader("ram", pair, batch_size=np.int64(4), device="cpu", seed=np.uint8(1)) as loader:
        assert len(loader) == 2


def test_samples_that_make_no_batch_are_refused_with_advice() -> None:
    samples = Made(lambda index: (torch.ones(index + 1), index), 4)
    with (
        make_loader("disk", samples, batch_size=2, device="cpu", seed=0, num_workers=0) as loader,
        pytest.raises(DataError, match=r"do not make a batch: .*same shape in a transform .* or use a DataLoader"),
    ):
        list(loader.epoch(0))
