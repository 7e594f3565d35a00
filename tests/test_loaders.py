"""The contract that every registered loader keeps, in one suite for them all."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitmnist.config import Shuffle
from vitmnist.data.dataset import Dataset, Split
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError

DISK = {
    "name": "disk",
    "num_workers": 0,
    "pin_memory": True,
    "prefetch_factor": 2,
    "persistent_workers": True,
}
LOADER_OPTIONS = {
    "disk": DISK,
    "disk, 1 worker": {**DISK, "num_workers": 1, "persistent_workers": False},
    "disk, 2 persistent workers": {**DISK, "num_workers": 2},
    "ram": {"name": "ram"},
    "gpu_slice": {"name": "gpu_slice"},
    "prefetch": {"name": "prefetch", "queue_size": 2, "base": {"name": "ram"}},
    "prefetch of gpu_slice": {"name": "prefetch", "queue_size": 1, "base": {"name": "gpu_slice"}},
    "prefetch of disk, 2 workers": {"name": "prefetch", "queue_size": 2, "base": {**DISK, "num_workers": 2}},
}
BATCH = 5
SEED = 7
CPU = torch.device("cpu")

Build = Callable[..., Loader]


def test_every_registered_loader_is_under_test() -> None:
    assert {options["name"] for options in LOADER_OPTIONS.values()} == set(LOADERS.names())


@pytest.fixture(params=LOADER_OPTIONS.values(), ids=LOADER_OPTIONS.keys())
def build(request: pytest.FixtureRequest, tiny: Dataset) -> Iterator[Build]:
    opened: list[Loader] = []

    def make(split: Split = tiny.train, batch_size: int = BATCH, seed: int = SEED, **order: object) -> Loader:
        loader = LOADERS.build(request.param, split, EpochOrder(len(split), batch_size, seed, **order), CPU)
        opened.append(loader)
        return loader

    yield make
    for loader in opened:
        loader.close()


def normalised(split: Split, batches: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copies of the batches as the model sees them."""
    preprocess = Preprocess(split)
    return [(preprocess(images).clone(), labels.clone()) for images, labels in batches]


def expected(split: Split, number: int, **order: object) -> list[tuple[Tensor, Tensor]]:
    """The batches of an epoch, straight from the definition."""
    indices = EpochOrder(len(split), BATCH, SEED, **order).batches(number)
    preprocess = Preprocess(split)
    return [(preprocess(split.images[index]), split.labels[index]) for index in indices]


def assert_same(found: list[tuple[Tensor, Tensor]], wanted: list[tuple[Tensor, Tensor]]) -> None:
    assert len(found) == len(wanted)
    for (images, labels), (wanted_images, wanted_labels) in zip(found, wanted, strict=True):
        assert labels.dtype == torch.int64
        assert torch.equal(labels, wanted_labels)
        assert images.dtype == torch.float32
        assert torch.equal(images, wanted_images)


@pytest.mark.parametrize("shuffle", Shuffle)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_loader_delivers_the_same_batches(build: Build, tiny: Dataset, shuffle: Shuffle, drop_last: bool) -> None:
    loader = build(shuffle=shuffle, drop_last=drop_last)
    for number in (0, 1):
        batches = normalised(tiny.train, loader.epoch(number))
        assert len(batches) == len(loader)
        assert_same(batches, expected(tiny.train, number, shuffle=shuffle, drop_last=drop_last))


@pytest.mark.parametrize("size", [1, BATCH - 1, BATCH, BATCH + 1])
def test_sets_around_the_size_of_a_batch(build: Build, tiny: Dataset, size: int) -> None:
    split = replace(tiny.train, images=tiny.train.images[:size], labels=tiny.train.labels[:size])
    assert_same(normalised(split, build(split).epoch(0)), expected(split, 0))


def test_an_epoch_can_begin_in_its_middle(build: Build, tiny: Dataset) -> None:
    assert_same(normalised(tiny.train, build().epoch(3, start=2)), expected(tiny.train, 3)[2:])


def test_live_iterators_do_not_disturb_each_other(build: Build, tiny: Dataset) -> None:
    loader = build()
    first, second = loader.epoch(0), loader.epoch(1)
    taken: tuple[list, list] = ([], [])
    for pair in zip(first, second, strict=True):
        for found, (images, labels) in zip(taken, pair, strict=True):
            found.append((Preprocess(tiny.train)(images).clone(), labels.clone()))
    assert_same(taken[0], expected(tiny.train, 0))
    assert_same(taken[1], expected(tiny.train, 1))


def test_an_abandoned_epoch_leaves_nothing_in_the_next(build: Build, tiny: Dataset) -> None:
    loader = build()
    for _ in loader.epoch(0):
        break
    assert_same(normalised(tiny.train, loader.epoch(1)), expected(tiny.train, 1))


def test_an_abandoned_or_closed_epoch_leaves_no_thread_and_no_process(build: Build) -> None:
    before = set(threading.enumerate())
    loader = build()
    abandoned, kept = loader.epoch(0), loader.epoch(1)
    next(abandoned), next(kept)
    del abandoned
    loader.close()  # under `kept`, which still lives
    deadline = time.monotonic() + 5
    while (set(threading.enumerate()) - before or multiprocessing.active_children()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert not multiprocessing.active_children()
    assert list(kept) == []


def test_a_worker_that_fails_is_named_and_leaves_no_process(tiny: Dataset, tmp_path: Path) -> None:
    """Even while somebody keeps the exception, whose traceback refers to the iterator."""
    file = tmp_path / "images"
    file.write_bytes(tiny.train.images_file.path.read_bytes())
    split = replace(tiny.train, images_file=replace(tiny.train.images_file, path=file))
    loader = LOADERS.build({**DISK, "num_workers": 2}, split, EpochOrder(23, 5, 1), CPU)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="images") as kept:
        list(loader.epoch(0))
    assert not multiprocessing.active_children()
    assert kept.value.__traceback__ is not None


def test_the_global_generator_is_left_alone(build: Build) -> None:
    state = torch.random.get_rng_state()
    list(build().epoch(0))
    assert torch.equal(state, torch.random.get_rng_state())


def test_preprocessing_leaves_the_set_alone(build: Build, tiny: Dataset) -> None:
    images = tiny.train.images.clone()
    normalised(tiny.train, build(shuffle=Shuffle.none).epoch(0))
    assert torch.equal(tiny.train.images, images)


@pytest.mark.parametrize("name", ["ram", "gpu_slice"])
def test_contiguous_batches_are_views(tiny: Dataset, name: str) -> None:
    loader = LOADERS.build({"name": name}, tiny.train, EpochOrder(23, 5, 1, Shuffle.batch), CPU)
    inside = range(tiny.train.images.data_ptr(), tiny.train.images.data_ptr() + tiny.train.images.numel())
    assert all(images.data_ptr() in inside for images, _ in loader.epoch(0))


def test_the_disk_loader_reads_the_disk(tiny: Dataset, tmp_path) -> None:
    """Changing the file changes the images: nothing of them is kept in memory."""
    file = tmp_path / "images"
    file.write_bytes(tiny.train.images_file.path.read_bytes())
    split = replace(tiny.train, images_file=replace(tiny.train.images_file, path=file))
    loader = LOADERS.build(DISK, split, EpochOrder(23, 23, 1, Shuffle.none), CPU)
    ((before, _),) = loader.epoch(0)
    with file.open("r+b") as opened:
        opened.seek(16)
        opened.write(bytes(28 * 28))
    ((after, _),) = loader.epoch(0)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_unknown_loaders_and_options_are_refused_by_name(tiny: Dataset) -> None:
    order = EpochOrder(23, 5, 1)
    with pytest.raises(ConfigError, match="did you mean 'gpu_slice'"):
        LOADERS.build({"name": "gpu_slce"}, tiny.train, order, CPU)
    with pytest.raises(ConfigError, match=r"data\.loader\.num_worker: .*did you mean 'num_workers'"):
        LOADERS.build({**DISK, "num_worker": 1}, tiny.train, order, CPU)
    base = {**DISK, "num_workers": -1}
    with pytest.raises(ConfigError, match=r"data\.loader\.base\.num_workers=-1: must be at least 0"):
        LOADERS.build({"name": "prefetch", "queue_size": 2, "base": base}, tiny.train, order, CPU)
    with pytest.raises(ConfigError, match=r"data\.loader\.queue_size=0: must be at least 1"):
        LOADERS.build({"name": "prefetch", "queue_size": 0, "base": {"name": "ram"}}, tiny.train, order, CPU)
    with pytest.raises(ConfigError, match="cannot wrap itself"):
        LOADERS.build({"name": "prefetch", "queue_size": 1, "base": {"name": "prefetch"}}, tiny.train, order, CPU)
