"""The order of an epoch: every image once, another order each epoch, nothing but (seed, epoch) behind it; its ranks."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from vitmnist.augment.base import draw_keys
from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import LOADERS

ONCE = [order for order in Shuffle if order != "balanced"]  # Every image comes once.
PUBLISHED_ORDERS = {  # Of seed 42 in epoch 1
    "sample": [4, 1, 7, 0, 6, 5, 2, 3],
    "batch": [0, 1, 2, 3, 6, 7, 4, 5],
    "balanced": [0, 15, 23, 1, 5, 7, 6, 4],
}


def epoch(sampler: EpochSampler, number: int, start: int = 0) -> list[list[int]]:
    """The indices of each batch."""
    rows = torch.arange(sampler.size)
    return [rows[batch].tolist() for batch in sampler.batch_indices(number, start)]


@given(
    size=st.integers(0, 60),
    batch_size=st.integers(1, 30),
    shuffle=st.sampled_from(ONCE),
    drop_last=st.booleans(),
    number=st.integers(0, 1000),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_shows_every_image_once_and_leaves_out_only_a_short_batch(
    size: int, batch_size: int, shuffle: Shuffle, drop_last: bool, number: int, seed: int
) -> None:
    assume(not (drop_last and size < batch_size))
    sampler = EpochSampler(size, batch_size, seed, shuffle, drop_last)
    batches = epoch(sampler, number)
    full, rest = divmod(size, batch_size)
    assert [len(batch) for batch in batches] == [batch_size] * full + ([rest] if rest and not drop_last else [])
    assert len(batches) == len(sampler)
    shown = sorted(chain.from_iterable(batches))
    assert shown == list(range(size)) if not drop_last else len(set(shown) & set(range(size))) == batch_size * full


@pytest.mark.parametrize("start", [-1, 4])
def test_an_epoch_cannot_begin_outside_itself(start: int) -> None:
    with pytest.raises(ValueError, match="an epoch has 3 batches"):
        next(EpochSampler(10, 4, seed=1).batch_indices(0, start))


@pytest.mark.parametrize("shuffle", [Shuffle.sample, Shuffle.batch])
def test_epochs_and_seeds_differ(shuffle: Shuffle) -> None:
    epochs = [(seed, number) for seed in (0, 1, 2, 2**32, 2**32 + 1) for number in range(4)]
    orders = {str(epoch(EpochSampler(400, 10, seed, shuffle), number)) for seed, number in epochs}
    assert len(orders) == len(epochs)


def test_shuffling_batches_moves_blocks_and_keeps_the_short_one_last() -> None:
    batches = list(EpochSampler(23, 5, seed=4, shuffle=Shuffle.batch).batch_indices(0))
    assert all(isinstance(batch, slice) for batch in batches)
    assert batches[-1] == slice(20, 23)
    assert batches[:-1] != sorted(batches[:-1], key=lambda batch: batch.start)


def test_the_order_and_the_keys_of_a_published_seed_never_change() -> None:
    """Published results can only be repeated with the same order and the same random numbers."""
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    samplers = {shuffle: EpochSampler(8, 2, 42, shuffle, labels=labels) for shuffle in PUBLISHED_ORDERS}
    assert {shuffle: sampler.draw_order(1).tolist() for shuffle, sampler in samplers.items()} == PUBLISHED_ORDERS
    keys = draw_keys(samplers["sample"], 1, torch.device("cpu"), start=3)
    assert keys.tolist() == [5096435173078774424, 8249711084140429577]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(2, 12),
    ranks=st.integers(1, 5),
    shuffle=st.sampled_from(Shuffle),
    drop_last=st.booleans(),
    start=st.integers(0, 20),
)
def test_the_parts_of_all_ranks_make_up_the_global_batch_also_if_an_epoch_begins_in_its_middle(
    size: int, batch_size: int, ranks: int, shuffle: Shuffle, drop_last: bool, start: int
) -> None:
    batch_size = max(batch_size, ranks)
    assume(not (drop_last and size < batch_size))
    sampler = EpochSampler(size, batch_size, 0, shuffle, drop_last, labels=torch.arange(size) % 7 // 5)
    start = min(start, len(sampler))
    samplers = [replace(sampler, rank=rank, world_size=ranks) for rank in range(ranks)]
    parts = [epoch(part, 1, start) for part in samplers]
    for part, batches in zip(samplers, parts, strict=True):
        counts = [part.num_rank_images(number) for number in range(start, len(sampler))]
        assert [len(batch) for batch in batches] == [max(count, 1) for count in counts]
        assert max(map(len, batches), default=0) <= part.rank_batch_size
        assert (part.sample_ids(1, start) % size).tolist() == list(chain.from_iterable(batches))
    for number, batch in enumerate(epoch(sampler, 1)[start:], start):
        pairs = zip(samplers, parts, strict=True)
        valid = [batches[number - start][: part.num_rank_images(number)] for part, batches in pairs]
        assert list(chain.from_iterable(valid)) == batch


def balanced(labels: list[int], seed: int) -> EpochSampler:
    return EpochSampler(len(labels), 7, seed=seed, shuffle="balanced", labels=torch.tensor(labels, dtype=torch.int64))


@given(labels=st.lists(st.sampled_from([0, 0, 0, 0, 1, 1, 3]), max_size=60), seed=st.integers(0, 9))
def test_balanced_draws_classes_equally_often_and_each_id_once(labels: list[int], seed: int) -> None:
    sampler, size = balanced(labels, seed=seed), len(labels)
    indices, sample_ids = [*chain.from_iterable(epoch(sampler, 2))], sampler.sample_ids(2).tolist()
    counts = [indices.count(index) for index in range(size)]
    by_class = [[counts[index] for index in range(size) if labels[index] == label] for label in set(labels)]
    for group in (*by_class, [sum(group) for group in by_class]):
        assert max(group, default=0) - min(group, default=0) <= 1
    assert sorted(sample_ids) == sorted(index + size * k for index in range(size) for k in range(counts[index]))
    assert [sample_id % size for sample_id in sample_ids] == indices


def test_balanced_epochs_seeds_and_remainders_differ() -> None:
    labels = [0] * 50 + [1] * 7 + [2] * 3 + [3]
    orders = {(seed, number): epoch(balanced(labels, seed=seed), number) for seed in (0, 1) for number in range(9)}
    assert len({str(order) for order in orders.values()}) == len(orders)
    most = {max(range(4), key=[labels[i] for i in chain.from_iterable(order)].count) for order in orders.values()}
    assert len(most) > 1


class Backwards(EpochSampler):
    """Another order, as `docs/architecture.md` describes it."""

    def draw_order(self, epoch: int) -> Tensor:
        return torch.arange(self.size).flip(0).roll(epoch)


@pytest.mark.parametrize("shuffle", ONCE)
@pytest.mark.parametrize("name", ["ram", "disk", "gpu_slice", "prefetch"])
def test_every_loader_takes_the_order_of_a_subclass(name: str, shuffle: Shuffle, tiny: Dataset) -> None:
    sampler = Backwards(23, 5, 3, shuffle)
    order = sampler.draw_order(2)
    with LOADERS.build({"name": name}, tiny.train, sampler, torch.device("cpu")) as loader:
        assert torch.cat([labels for _, labels in loader.epoch(2)]).equal(tiny.train.labels[order])
