"""Whether a loader keeps the contract: the suite that this project's own loaders pass, for yours.

from vitmnist import register
from vitmnist.testing import check_loader

def test_my_loader():
    check_loader("mine")
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from vitmnist.config.schema import Shuffle
from vitmnist.data.collate import collate_samples
from vitmnist.data.datasets.base import Split
from vitmnist.data.loaders import Batch, Data, Loader, make_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError

BATCH = 5
SIZE = 23
SEED = 7
GRACE_S = 5.0  # threads and processes end within a second; a busy machine is given more


def check_loader(
    name: str, data: Data | tuple[Tensor, Tensor] | None = None, *, device: str = "cpu", **options: Any
) -> None:
    """Check every promise of the contract for the loader `name`.

    Args:
        name: as `register` was given it.
        data: what it is to load, at least 23 samples; a pair of random tensors if None.
        device: where the batches are to be.
        options: the loader's own.

    Raises:
        AssertionError: a promise that is not kept; the message begins with it.
    """
    case = Case.of(name, data, device, options)
    for promise in PROMISES:
        try:
            promise(case)
        except Exception as broken:  # a loader of one's own may fail in any way
            kind = "" if isinstance(broken, AssertionError) else f"{type(broken).__name__}: "
            raise AssertionError(f"{name}: {promise.__doc__}: {kind}{broken}") from broken


@dataclass(frozen=True)
class Case:
    """A loader under test."""

    name: str
    data: Data
    device: str
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, data: Data | tuple[Tensor, Tensor] | None, device: str, options: dict[str, Any]) -> Case:
        """The case of `check_loader`'s arguments."""
        if data is None:
            generator = torch.Generator().manual_seed(SEED)
            images = torch.randint(0, 256, (SIZE, 1, 4, 6), generator=generator, dtype=torch.uint8)
            data = images, torch.randint(0, 10, (SIZE,), generator=generator)
        loaded = TensorSet(*data) if isinstance(data, (tuple, list)) else data
        if len(loaded) < SIZE:  # type: ignore[arg-type]
            raise ValueError(f"the check needs {SIZE} samples or more")
        return cls(name, loaded, device, options)

    def of_size(self, size: int) -> Case:
        """The same with the first `size` samples."""
        if isinstance(self.data, TensorSet):
            images, labels = self.data.images[:size], self.data.labels[:size]
            if isinstance(self.data, Split):
                return replace(self, data=replace(self.data, images=images, labels=labels, sha256=None))
            return replace(self, data=replace(self.data, images=images, labels=labels))
        return replace(self, data=Subset(self.data, range(size)))

    def numbered(self) -> Case:
        """The same with each sample's index for its label."""
        if isinstance(self.data, TensorSet):
            labels = torch.arange(len(self.data))
            if isinstance(self.data, Split):  # whose labels must be classes
                classes = tuple(map(str, labels.tolist()))
                return replace(self, data=replace(self.data, labels=labels, classes=classes))
            return replace(self, data=replace(self.data, labels=labels))
        return replace(self, data=Numbered(self.data))

    @contextmanager
    def open(self, **sampler: Any) -> Iterator[Loader]:
        """The loader, closed at the end."""
        settings = {"batch_size": BATCH, "seed": SEED, **sampler}
        with make_loader(self.name, self.data, device=self.device, **settings, **self.options) as loader:
            yield loader

    def expected(self, number: int, shuffle: str = "sample", drop_last: bool = False) -> list[Batch]:
        """The batches of an epoch, straight from the definition."""
        size = len(self.data)  # type: ignore[arg-type]
        batches = []
        for indices in EpochSampler(size, BATCH, SEED, Shuffle(shuffle), drop_last).batches(number):
            if isinstance(self.data, TensorSet):
                batches.append((self.data.images[indices], self.data.labels[indices]))
            else:
                chosen = torch.arange(size)[indices].tolist()
                batches.append(collate_samples(read_samples(self.data, chosen, SEED, number)))
        return self.seen(batches)

    def seen(self, batches: Iterable[Batch]) -> list[Batch]:
        """Copies of the batches on the CPU, as a model would see them: a split's are normalised."""
        copies = []
        for images, labels in batches:
            normalised = Preprocess(self.data)(images.cpu()) if isinstance(self.data, Split) else images.cpu()
            copies.append((normalised.clone(), labels.cpu().clone()))
        return copies


class Numbered(Dataset[tuple[Any, int]]):
    """A data set with each sample's index for its label."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.samples[index][0], index


class Noisy(Dataset[tuple[Any, Any]]):
    """A data set whose images are noise, drawn as transforms draw it: from torch's, NumPy's and Python's generators."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        noise = torch.tensor([np.random.rand(), random.random()])
        return torch.cat([noise, torch.rand(2, dtype=noise.dtype)]), self.samples[index][1]


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    """Two lists of batches are equal bit for bit, shapes and dtypes included."""
    assert len(found) == len(wanted), f"{len(found)} batches, not {len(wanted)}"
    for number, pair in enumerate(zip(found, wanted, strict=True)):
        for name, one, other in zip(("images", "labels"), *pair, strict=True):
            assert one.dtype == other.dtype, f"{name} of batch {number} are {one.dtype}, not {other.dtype}"
            assert one.shape == other.shape, f"{name} of batch {number} are {list(one.shape)}, not {list(other.shape)}"
            assert torch.equal(one, other), f"{name} of batch {number} differ"


def same_batches(case: Case) -> None:
    """it delivers the batches that the order names, bit for bit"""
    for shuffle in Shuffle:
        for drop_last in (False, True):
            with case.open(shuffle=shuffle.value, drop_last=drop_last) as loader:
                for number in (0, 1):
                    batches = case.seen(loader.epoch(number))
                    assert len(loader) == len(batches), f"its length is {len(loader)}, batches {len(batches)}"
                    assert_same(batches, case.expected(number, shuffle.value, drop_last))


def on_the_device(case: Case) -> None:
    """its batches are on the device"""
    with case.open() as loader:
        places = {array.device.type for batch in loader.epoch(0) for array in batch}
    assert places == {torch.device(case.device).type}, f"they are on {', '.join(places)}, not on {case.device}"


def each_sample_once(case: Case) -> None:
    """an epoch holds every sample once, and another epoch holds them in another order"""
    with case.numbered().open() as loader:
        first, second, again = (
            torch.cat([labels.cpu().clone() for _, labels in loader.epoch(number)]) for number in (0, 1, 0)
        )
    everything = torch.arange(len(case.data))  # type: ignore[arg-type]
    assert torch.equal(first.sort().values, everything), "some came twice or not at all"
    assert torch.equal(second.sort().values, everything), "some came twice or not at all"
    assert not torch.equal(first, second), "epochs 0 and 1 have the same order"
    assert torch.equal(first, again), "epoch 0 had another order when it was asked for again"


def epochs_begin_anywhere(case: Case) -> None:
    """`epoch(e, start=k)` is the tail of epoch e"""
    wanted = case.expected(3)
    with case.open() as loader:
        for start in range(len(wanted) + 1):
            assert_same(case.seen(loader.epoch(3, start)), wanted[start:])


def live_iterators(case: Case) -> None:
    """iterators that live at the same time do not disturb each other"""
    taken: tuple[list[Batch], list[Batch]] = ([], [])
    with case.open() as loader:
        for pair in zip(loader.epoch(0), loader.epoch(1), strict=True):
            for batches, batch in zip(taken, pair, strict=True):
                batches.extend(case.seen([batch]))
    assert_same(taken[0], case.expected(0))
    assert_same(taken[1], case.expected(1))


def nothing_stale(case: Case) -> None:
    """an epoch that was abandoned leaves nothing in the next"""
    with case.open() as loader:
        for _ in loader.epoch(0):
            break
        assert_same(case.seen(loader.epoch(1)), case.expected(1))


def any_size(case: Case) -> None:
    """sets of no sample, of one, and around the size of a batch are delivered whole"""
    sizes = (0, 1, BATCH - 1, BATCH, BATCH + 1)
    # A data set that is read sample by sample has no shape to tell before its first sample.
    for size in sizes if isinstance(case.data, TensorSet) else sizes[1:]:
        for drop_last in (False, True):
            part = case.of_size(size)
            with part.open(drop_last=drop_last) as loader:
                assert_same(part.seen(loader.epoch(0)), part.expected(0, drop_last=drop_last))


def iterators_hold_their_loader(case: Case) -> None:
    """an iterator keeps its loader alive"""
    wanted = case.expected(0)
    options = {"batch_size": BATCH, "seed": SEED, "device": case.device, **case.options}
    iterator = make_loader(case.name, case.data, **options).epoch(0)
    gc.collect()
    assert_same(case.seen(iterator), wanted)


def batches_are_kept(case: Case) -> None:
    """a batch that is kept is not overwritten by a later one"""
    with case.open() as loader:
        kept = list(loader.epoch(0))
        assert_same(case.seen(kept), case.expected(0))


def the_set_is_left_alone(case: Case) -> None:
    """writing into a gathered batch changes neither the set nor another batch"""
    wanted = case.expected(0)
    with case.open() as loader:
        kept = list(loader.epoch(0))
        for (images, labels), batch in zip(kept, wanted, strict=True):
            assert_same(case.seen([(images, labels)]), [batch])
            images.zero_()
            labels.zero_()
        assert_same(case.seen(loader.epoch(0)), wanted)
    assert_same(case.expected(0), wanted)


def no_global_randomness(case: Case) -> None:
    """the global random generators are left alone"""
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    with case.open() as loader:
        for _ in loader.epoch(0):
            pass
    assert torch.equal(before[0], torch.random.get_rng_state()), "torch's was used"
    assert before[1] == np.random.get_state()[1].tolist(), "NumPy's was used"  # type: ignore[index]
    assert before[2] == random.getstate(), "Python's was used"


def randomness_is_not_frozen(case: Case) -> None:
    """random samples are a function of (seed, epoch, index), or refused"""
    if isinstance(case.data, TensorSet):
        return  # nothing random can be read from tensors
    noisy = replace(case, data=Noisy(case.data))
    try:
        with noisy.open() as loader:
            for number, start in ((0, 0), (0, 0), (1, 0), (0, 2)):
                assert_same(noisy.seen(loader.epoch(number, start)), noisy.expected(number)[start:])
    except ConfigError:
        return


def nothing_left_behind(case: Case) -> None:
    """an epoch that was abandoned and a loader that was closed leave no thread and no process"""
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    with case.open() as loader:
        abandoned, kept = loader.epoch(0), loader.epoch(1)
        next(abandoned), next(kept)
        del abandoned
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        gc.collect()
        if set(threading.enumerate()) <= threads and set(multiprocessing.active_children()) <= processes:
            break
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads, "a thread is left"
    assert set(multiprocessing.active_children()) <= processes, "a process is left"
    assert list(kept) == [], "an iterator of the closed loader went on"


PROMISES: tuple[Callable[[Case], None], ...] = (
    same_batches,
    on_the_device,
    each_sample_once,
    epochs_begin_anywhere,
    iterators_hold_their_loader,
    batches_are_kept,
    live_iterators,
    nothing_stale,
    any_size,
    the_set_is_left_alone,
    no_global_randomness,
    randomness_is_not_frozen,
    nothing_left_behind,
)
