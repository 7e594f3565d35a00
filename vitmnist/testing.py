"""Checks that a loader keeps the contract: the suite that this project's own loaders pass, for yours.

from vitmnist import register
from vitmnist.testing import check_loader

def test_my_loader():
    check_loader("mine")
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from vitmnist.config.schema import Shuffle
from vitmnist.data.collate import collate_samples
from vitmnist.data.datasets.base import Split
from vitmnist.data.loaders import Batch, Data, Loader, loadable, make_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import changed_generators, draw_from_generators, generator_states, read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.runtime.leftovers import left_since, running

BATCH_SIZE = 5
SIZE = 23
SEED = 7


def check_loader(
    name: str, data: Data | tuple[Tensor, Tensor] | None = None, *, device: str = "cpu", **options: Any
) -> None:
    """Check every promise of the contract for the loader `name`.

    Args:
        name: as passed to `register`.
        data: what to load, at least 23 samples; a pair of random tensors if None.
        device: where the batches are delivered.
        options: the loader's own.

    Raises:
        AssertionError: a broken promise; the message begins with it.
    """
    case = Case.of(name, data, device, options)
    for promise in PROMISES:
        try:
            promise(case)
        except Exception as broken:  # a loader may fail in any way
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
        loaded = loadable(data)
        if len(loaded) < SIZE:  # type: ignore[arg-type]
            raise ValueError(f"the check needs {SIZE} samples or more")
        return cls(name, loaded, device, options)

    def first(self, size: int) -> Case:
        """The same loader with the first `size` samples."""
        if isinstance(self.data, Split):
            return replace(self, data=self.data.part(slice(size)))
        if isinstance(self.data, TensorSet):
            return replace(self, data=TensorSet(self.data.images[:size], self.data.labels[:size]))
        return replace(self, data=Subset(self.data, range(size)))

    def build(self, **settings: Any) -> Loader:
        """The loader, with some other arguments of `make_loader`."""
        settings = {"batch_size": BATCH_SIZE, "seed": SEED, **settings}
        return make_loader(self.name, self.data, device=self.device, **settings, **self.options)

    def expected(self, number: int, shuffle: str = "sample", drop_last: bool = False) -> list[Batch]:
        """The batches of an epoch, straight from the definition."""
        size = len(self.data)  # type: ignore[arg-type]
        batches = []
        for indices in EpochSampler(size, BATCH_SIZE, SEED, Shuffle(shuffle), drop_last).batches(number):
            if isinstance(self.data, TensorSet):
                batches.append((self.data.images[indices], self.data.labels[indices]))
            else:
                chosen = torch.arange(size)[indices].tolist()
                batches.append(collate_samples(read_samples(self.data, chosen, SEED, number)))
        return self.copies(batches)

    def copies(self, batches: Iterable[Batch]) -> list[Batch]:
        """Copies of the batches on the CPU as a model would see them: those of a split are normalised."""
        preprocess = Preprocess(self.data) if isinstance(self.data, Split) else torch.nn.Identity()
        return [(preprocess(images.cpu()).clone(), labels.cpu().clone()) for images, labels in batches]


class Relabelled(Dataset[tuple[Any, Any]]):
    """A data set whose labels are the indices, or whose images are noise from torch, NumPy and Python."""

    def __init__(self, samples: Dataset[Any], noise: bool) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.samples[index]
        if not self.noise:
            return image, index
        return torch.from_numpy(draw_from_generators()), label


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    """Two lists of batches are equal bit for bit, shapes and dtypes included."""
    assert len(found) == len(expected), f"{len(found)} batches, not {len(expected)}"
    for number, pair in enumerate(zip(found, expected, strict=True)):
        for name, one, other in zip(("images", "labels"), *pair, strict=True):
            assert one.dtype == other.dtype, f"{name} of batch {number} are {one.dtype}, not {other.dtype}"
            assert one.shape == other.shape, f"{name} of batch {number} are {list(one.shape)}, not {list(other.shape)}"
            assert torch.equal(one, other), f"{name} of batch {number} differ"


def same_batches(case: Case) -> None:
    """it delivers the batches that the order names, bit for bit"""
    for shuffle in Shuffle:
        for drop_last in (False, True):
            with case.build(shuffle=shuffle.value, drop_last=drop_last) as loader:
                for number in (0, 1):
                    batches = case.copies(loader.epoch(number))
                    assert len(loader) == len(batches), f"its length is {len(loader)}, batches {len(batches)}"
                    assert_same(batches, case.expected(number, shuffle.value, drop_last))


def on_the_device(case: Case) -> None:
    """its batches are on the device"""
    with case.build() as loader:
        places = {tensor.device.type for batch in loader.epoch(0) for tensor in batch}
    assert places == {torch.device(case.device).type}, f"they are on {', '.join(places)}, not on {case.device}"


def each_sample_once(case: Case) -> None:
    """an epoch holds every sample once, and another epoch holds them in another order"""
    size = len(case.data)  # type: ignore[arg-type]
    if isinstance(case.data, TensorSet):
        numbered = replace(case, data=TensorSet(case.data.images, torch.arange(size)))
    else:
        numbered = replace(case, data=Relabelled(case.data, noise=False))
    with numbered.build() as loader:
        first, second = (torch.cat([labels.cpu().clone() for _, labels in loader.epoch(number)]) for number in (0, 1))
    for labels in (first, second):
        assert torch.equal(labels.sort().values, torch.arange(size)), "some came twice or not at all"
    assert not torch.equal(first, second), "epochs 0 and 1 have the same order"


def epochs_begin_anywhere(case: Case) -> None:
    """`epoch(e, start=k)` is the tail of epoch e"""
    expected = case.expected(3)
    with case.build() as loader:
        for start in range(len(expected) + 1):
            assert_same(case.copies(loader.epoch(3, start)), expected[start:])


def live_iterators(case: Case) -> None:
    """iterators that live at the same time, and abandoned ones, do not disturb each other"""
    seen: tuple[list[Batch], list[Batch]] = ([], [])
    with case.build() as loader:
        next(loader.epoch(2))
        for pair in zip(loader.epoch(0), loader.epoch(1), strict=True):
            for batches, batch in zip(seen, pair, strict=True):
                batches.extend(case.copies([batch]))
    assert_same(seen[0], case.expected(0))
    assert_same(seen[1], case.expected(1))


def epochs_ahead(case: Case) -> None:
    """with a known number of epochs, it delivers the same batches, whichever epoch follows"""
    with case.build(epochs=4) as loader:
        for number, start in ((0, 0), (1, 0), (2, 3), (3, 0), (1, 0), (1, 0), (4, 0)):
            assert_same(case.copies(loader.epoch(number, start)), case.expected(number)[start:])


def any_size(case: Case) -> None:
    """sets of no sample, of one, and around the size of a batch are delivered completely"""
    # A map-style data set has no shape before its first sample.
    for size in (0, 1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1)[0 if isinstance(case.data, TensorSet) else 1 :]:
        for drop_last in (False, True):
            part = case.first(size)
            with part.build(drop_last=drop_last) as loader:
                assert_same(part.copies(loader.epoch(0)), part.expected(0, drop_last=drop_last))


def iterators_hold_their_loader(case: Case) -> None:
    """an iterator keeps its loader alive"""
    iterator = case.build().epoch(0)
    gc.collect()
    assert_same(case.copies(iterator), case.expected(0))


def batches_are_kept(case: Case) -> None:
    """a batch that is kept is not overwritten, and writing into it changes neither the set nor another batch"""
    expected = case.expected(0)
    with case.build() as loader:
        batches = list(loader.epoch(0))
        for batch, target in zip(batches, expected, strict=True):
            assert_same(case.copies([batch]), [target])
            for tensor in batch:
                tensor.zero_()
        assert_same(case.copies(loader.epoch(0)), expected)
    assert_same(case.expected(0), expected)


def no_global_randomness(case: Case) -> None:
    """the global random generators are left alone"""
    before = generator_states()
    with case.build() as loader:
        _exhaust(loader.epoch(0))
    for name in changed_generators(before):
        raise AssertionError(f"{name}'s was used")


def randomness_is_not_frozen(case: Case) -> None:
    """random samples are a function of (seed, epoch, index), or refused"""
    if isinstance(case.data, TensorSet):
        return  # tensors are not random
    noisy = replace(case, data=Relabelled(case.data, noise=True))
    try:
        with noisy.build() as loader:
            for number, start in ((0, 0), (0, 0), (1, 0), (0, 2)):
                assert_same(noisy.copies(loader.epoch(number, start)), noisy.expected(number)[start:])
    except ConfigError:
        return


def nothing_left_behind(case: Case) -> None:
    """an abandoned epoch, a closed loader and a collected one leave no thread and no process"""
    before = running()
    with case.build(epochs=2) as loader:
        abandoned, kept = loader.epoch(0), loader.epoch(1)
        next(abandoned), next(kept)
        del abandoned
        _exhaust(loader.epoch(0))
    _assert_none_left(before)
    assert list(kept) == [], "an iterator of the closed loader continued"
    collected = case.build(epochs=2)
    _exhaust(collected.epoch(0))
    del collected
    _assert_none_left(before)


def _exhaust(batches: Iterator[Batch]) -> None:
    for _ in batches:
        pass


def _assert_none_left(before: set[object]) -> None:
    left = left_since(before)
    assert not left, f"a {' and a '.join(left)} is left"


PROMISES: tuple[Callable[[Case], None], ...] = (
    same_batches,
    on_the_device,
    each_sample_once,
    epochs_begin_anywhere,
    epochs_ahead,
    iterators_hold_their_loader,
    batches_are_kept,
    live_iterators,
    any_size,
    no_global_randomness,
    randomness_is_not_frozen,
    nothing_left_behind,
)
