"""The order of an epoch: every image once, another order each epoch, and nothing but (seed, epoch) behind it."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitmnist.config.schema import Shuffle
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError

shapes = st.tuples(st.integers(1, 60), st.integers(1, 70))


def indices_of(batches: list[slice | Tensor]) -> list[list[int]]:
    return [list(range(batch.start, batch.stop)) if isinstance(batch, slice) else batch.tolist() for batch in batches]


def epoch(sampler: EpochSampler, number: int, start: int = 0) -> list[list[int]]:
    return indices_of(list(sampler.batches(number, start)))


@given(shape=shapes, shuffle=st.sampled_from(Shuffle), number=st.integers(0, 1000), seed=st.integers(0, 2**40))
def test_an_epoch_shows_every_image_once(shape: tuple[int, int], shuffle: Shuffle, number: int, seed: int) -> None:
    size, batch_size = shape
    sampler = EpochSampler(size, batch_size, seed, shuffle)
    batches = epoch(sampler, number)
    assert sorted(chain.from_iterable(batches)) == list(range(size))
    assert len(batches) == len(sampler)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(shape=shapes, shuffle=st.sampled_from(Shuffle))
def test_drop_last_leaves_out_the_short_batch_alone(shape: tuple[int, int], shuffle: Shuffle) -> None:
    size, batch_size = max(shape), min(shape)
    sampler = EpochSampler(size, batch_size, seed=1, shuffle=shuffle, drop_last=True)
    batches = epoch(sampler, 3)
    assert [len(batch) for batch in batches] == [batch_size] * (size // batch_size)
    assert len(set(chain.from_iterable(batches))) == batch_size * len(sampler)


@given(shape=shapes, shuffle=st.sampled_from(Shuffle), start=st.integers(0, 60))
def test_an_epoch_can_begin_in_its_middle(shape: tuple[int, int], shuffle: Shuffle, start: int) -> None:
    sampler = EpochSampler(*shape, seed=1, shuffle=shuffle)
    start = min(start, len(sampler))
    assert epoch(sampler, 2, start) == epoch(sampler, 2)[start:]


@pytest.mark.parametrize("start", [-1, 4])
def test_an_epoch_cannot_begin_outside_itself(start: int) -> None:
    with pytest.raises(ValueError, match="an epoch has 3 batches"):
        next(EpochSampler(10, 4, seed=1).batches(0, start))


@pytest.mark.parametrize("shuffle", [Shuffle.sample, Shuffle.batch])
def test_epochs_and_seeds_differ_and_repeat(shuffle: Shuffle) -> None:
    orders = {
        (seed, number): str(epoch(EpochSampler(400, 10, seed, shuffle), number))
        for seed in (0, 1, 2, 2**32, 2**32 + 1)
        for number in (0, 1, 2, 3)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[2**32, 3] == str(epoch(EpochSampler(400, 10, 2**32, shuffle), 3))


def test_shuffling_batches_moves_blocks_and_keeps_the_short_one_last() -> None:
    batches = list(EpochSampler(23, 5, seed=4, shuffle=Shuffle.batch).batches(0))
    assert all(isinstance(batch, slice) for batch in batches)
    assert batches[-1] == slice(20, 23)
    assert batches[:-1] != sorted(batches[:-1], key=lambda batch: batch.start)


def test_the_order_of_a_published_seed_stays_what_it_was() -> None:
    """A figure of an earlier version can only be repeated if its order can."""
    assert epoch(EpochSampler(8, 3, seed=42), 0) == [[0, 3, 1], [2, 4, 5], [6, 7]]


def test_an_epoch_may_have_no_batch() -> None:
    assert len(EpochSampler(10, 11, 0, drop_last=True)) == len(EpochSampler(0, 11, 0)) == 0
    assert list(EpochSampler(10, 11, 0, drop_last=True).batches(0)) == list(EpochSampler(0, 11, 0).batches(0)) == []


@pytest.mark.parametrize("shuffle", Shuffle)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_indices_of_an_epoch_are_those_of_its_batches(shuffle: Shuffle, drop_last: bool) -> None:
    sampler = EpochSampler(23, 5, 1, shuffle, drop_last)
    whole = sampler.indices(3).split(5)
    assert len(whole) == len(sampler)
    for found, batch in zip(whole, sampler.batches(3), strict=True):
        assert torch.equal(found, torch.arange(23)[batch])


def test_a_batch_size_or_seed_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        EpochSampler(10, 0, 0)
    with pytest.raises(ConfigError, match="seed=-1: must be at least 0"):
        EpochSampler(10, 1, -1)


def test_the_permutation_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the loader and for the augmentation; what one of them does to its indices does not reach the other."""
    draws, draw = [], torch.randperm

    def counted(*parts: Any, **options: Any) -> Tensor:
        draws.append(parts)
        return draw(*parts, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    sampler = EpochSampler(1013, 100, seed=7919)
    expected = sampler.indices(5).clone()
    sampler.indices(5).zero_()
    next(iter(sampler.batches(5, start=1))).zero_()
    assert torch.equal(sampler.indices(5), expected)
    assert len(draws) == 1
