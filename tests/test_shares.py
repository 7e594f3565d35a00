"""A rank's part of an epoch: together they see what one process sees, with any loader; or each a shard of the set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitmnist.config import Shuffle
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.loaders.gpu_slice import GpuSliceLoader, GpuSliceOptions, Placement
from vitmnist.data.order import EpochOrder
from vitmnist.data.shares import RankOrder, ShardOrder
from vitmnist.memory import Memory
from vitmnist.trainee import place
from vitmnist.world import World

CPU = torch.device("cpu")


def parts_of(order: EpochOrder, number: int, start: int = 0) -> list[Tensor]:
    everything = torch.arange(order.whole.size + 1)
    return [everything[batch] for batch in order.batches(number, start)]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(2, 12),
    number=st.integers(2, 5),
    shuffle=st.sampled_from(Shuffle),
    drop_last=st.booleans(),
    start=st.integers(0, 20),
)
def test_all_ranks_see_together_what_one_process_sees(
    size: int, batch_size: int, number: int, shuffle: Shuffle, drop_last: bool, start: int
) -> None:
    order = EpochOrder(size, max(batch_size, number), 3, shuffle, drop_last)
    start = min(start, len(order))
    own = [RankOrder.of(order, rank, number) for rank in range(number)]
    delivered = [parts_of(part, 1, start) for part in own]
    for part, batches in zip(own, delivered, strict=True):
        assert [len(batch) for batch in batches] == [max(part.count(k), 1) for k in range(start, len(order))]
        assert max(map(len, batches), default=0) <= part.batch_size
        assert torch.equal(part.indices(1, start), torch.cat([torch.arange(0), *batches]))
    for number_of_batch, whole in enumerate(parts_of(order, 1, start)):
        counted = [
            batches[number_of_batch][: part.count(start + number_of_batch)]
            for part, batches in zip(own, delivered, strict=True)
        ]
        assert torch.equal(torch.cat(counted), whole)


@given(size=st.integers(5, 40), batch_size=st.integers(5, 12), number=st.integers(2, 5), start=st.integers(0, 20))
@pytest.mark.parametrize("shuffle", Shuffle)
@pytest.mark.parametrize("drop_last", [False, True])
def test_shards_divide_the_set_and_fill_the_batches(
    shuffle: Shuffle, drop_last: bool, size: int, batch_size: int, number: int, start: int
) -> None:
    order = EpochOrder(size, batch_size, 3, shuffle, drop_last)
    own = [ShardOrder.of(order, rank, number) for rank in range(number)]
    seen = []
    for part in own:
        batches = parts_of(part, 1)
        counted = [batch[: part.count(place)] for place, batch in enumerate(batches)]
        assert len(batches) == len(order)
        assert all(((part.first <= batch) & (batch < part.first + part.size)).all() for batch in counted)
        assert torch.equal(part.within.indices(1) + part.first, part.indices(1))
        tail = parts_of(part, 1, min(start, len(order)))
        assert all(map(torch.equal, tail, batches[min(start, len(order)) :]))
        seen.append(torch.cat([torch.arange(0), *counted]))
    everything = torch.cat(seen)
    assert len(everything) == len(everything.unique()) == sum(order.count(k) for k in range(len(order)))


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "prefetch", "cache", "disk"])
@pytest.mark.parametrize("kind", [RankOrder, ShardOrder])
def test_every_loader_delivers_a_ranks_part(
    name: str, kind: type[RankOrder | ShardOrder], tiny: Dataset, tmp_path: Path
) -> None:
    order = kind.of(EpochOrder(23, 11, 3), 1, 2)
    options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})
    values = LOADERS.complete({"name": name, **options})
    split = tiny.train
    with LOADERS.build(values, split, order, CPU) as loader:
        delivered = torch.cat([labels for _, labels in loader.epoch(1)])
    assert torch.equal(delivered, split.labels[order.indices(1)])


def test_the_set_is_sharded_where_it_does_not_fit(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank of two there is no memory left."""
    world = World()
    world.size = 2
    monkeypatch.setattr(world, "gather", lambda fits: [True, fits])
    monkeypatch.setattr("vitmnist.trainee.free_memory", lambda device: Memory(host=2**40, device=100))
    monkeypatch.setattr(GpuSliceLoader, "needs", lambda *parts: Memory(device=60))
    order = EpochOrder(23, 10, 3)
    assert place(GpuSliceOptions(), tiny, order, torch.device("cuda"), world) == Placement.shard
    assert place(GpuSliceOptions(Placement.replicate), tiny, order, torch.device("cuda"), world) == Placement.replicate


def test_a_shard_takes_the_memory_of_a_shard(tiny: Dataset) -> None:
    whole = EpochOrder(23, 10, 3)
    device = torch.device("cuda")
    shares = [
        GpuSliceLoader.needs(GpuSliceOptions(), tiny.train, ShardOrder.of(whole, rank, 2), device).device
        for rank in range(2)
    ]
    assert sum(shares) == GpuSliceLoader.needs(GpuSliceOptions(), tiny.train, whole, device).device
