"""The ranks' parts of each batch add up to the batch of one process, with any loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.rank_sampler import RankSampler
from vitmnist.data.sampler import EpochSampler

CPU = torch.device("cpu")


def index_batches(sampler: EpochSampler, epoch: int, start: int = 0) -> list[Tensor]:
    """The indices of each batch; a sampler may also yield slices."""
    indices = torch.arange(sampler.global_sampler.size + 1)
    return [indices[batch] for batch in sampler.batches(epoch, start)]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(2, 12),
    ranks=st.integers(2, 5),
    shuffle=st.sampled_from(Shuffle),
    drop_last=st.booleans(),
    start=st.integers(0, 20),
)
def test_the_parts_of_all_ranks_make_up_the_global_batch(
    size: int, batch_size: int, ranks: int, shuffle: Shuffle, drop_last: bool, start: int
) -> None:
    sampler = EpochSampler(size, max(batch_size, ranks), 3, shuffle, drop_last)
    start = min(start, len(sampler))
    samplers = [RankSampler.of(sampler, rank, ranks) for rank in range(ranks)]
    parts = [index_batches(own, 1, start) for own in samplers]
    for own, batches in zip(samplers, parts, strict=True):
        assert [len(batch) for batch in batches] == [max(own.num_valid(k), 1) for k in range(start, len(sampler))]
        assert max(map(len, batches), default=0) <= own.batch_size
        assert torch.equal(own.indices(1, start), torch.cat([torch.arange(0), *batches]))
    for number, batch in enumerate(index_batches(sampler, 1, start)):
        valid = [batches[number][: own.num_valid(start + number)] for own, batches in zip(samplers, parts, strict=True)]
        assert torch.equal(torch.cat(valid), batch)


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "prefetch", "cache", "disk"])
def test_every_loader_delivers_the_part_of_a_rank(name: str, tiny: Dataset, tmp_path: Path) -> None:
    sampler = RankSampler.of(EpochSampler(23, 11, 3), 1, 2)
    options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})
    values = LOADERS.complete({"name": name, **options})
    with LOADERS.build(values, tiny.train, sampler, CPU) as loader:
        delivered = torch.cat([labels for _, labels in loader.epoch(1)])
    assert torch.equal(delivered, tiny.train.labels[sampler.indices(1)])
