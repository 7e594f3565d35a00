"""A rank's part of an epoch: together they see what one process sees, with any loader."""

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


def parts_of(sampler: EpochSampler, number: int, start: int = 0) -> list[Tensor]:
    everything = torch.arange(sampler.global_sampler.size + 1)
    return [everything[batch] for batch in sampler.batches(number, start)]


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
    sampler = EpochSampler(size, max(batch_size, number), 3, shuffle, drop_last)
    start = min(start, len(sampler))
    own = [RankSampler.of(sampler, rank, number) for rank in range(number)]
    delivered = [parts_of(part, 1, start) for part in own]
    for part, batches in zip(own, delivered, strict=True):
        assert [len(batch) for batch in batches] == [max(part.num_valid(k), 1) for k in range(start, len(sampler))]
        assert max(map(len, batches), default=0) <= part.batch_size
        assert torch.equal(part.indices(1, start), torch.cat([torch.arange(0), *batches]))
    for number_of_batch, whole in enumerate(parts_of(sampler, 1, start)):
        counted = [
            batches[number_of_batch][: part.num_valid(start + number_of_batch)]
            for part, batches in zip(own, delivered, strict=True)
        ]
        assert torch.equal(torch.cat(counted), whole)


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "prefetch", "cache", "disk"])
def test_every_loader_delivers_a_ranks_part(name: str, tiny: Dataset, tmp_path: Path) -> None:
    sampler = RankSampler.of(EpochSampler(23, 11, 3), 1, 2)
    options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})
    values = LOADERS.complete({"name": name, **options})
    split = tiny.train
    with LOADERS.build(values, split, sampler, CPU) as loader:
        delivered = torch.cat([labels for _, labels in loader.epoch(1)])
    assert torch.equal(delivered, split.labels[sampler.indices(1)])
