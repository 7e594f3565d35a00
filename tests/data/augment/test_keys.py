"""The random numbers of an image depend on the seed, the epoch and its index alone."""

from __future__ import annotations

import torch
from torch import Tensor

from vitmnist.data.augment import augment_keys
from vitmnist.data.augment.keys import _mix64
from vitmnist.data.sampler import EpochSampler

CPU = torch.device("cpu")


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The generator's first outputs for seed 1234567, as published with its reference implementation."""
    states = [(1234567 + 0x9E3779B97F4A7C15 * step) % 2**64 for step in (1, 2, 3)]
    found = _mix64(torch.tensor([state - 2**64 if state >= 2**63 else state for state in states]))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in found.tolist()] == published


def by_index(batch_size: int, shuffle: str, seed: int = 5, epoch: int = 2) -> Tensor:
    sampler = EpochSampler(1000, batch_size, seed, shuffle)
    numbers = torch.empty(1000, dtype=torch.int64)
    numbers[sampler.indices(epoch)] = augment_keys(sampler, epoch, CPU)
    return numbers


def test_an_images_number_depends_on_seed_epoch_and_index_and_not_on_its_batch() -> None:
    """Neither on the batch size nor on the order."""
    expected = by_index(1, "none")
    assert torch.equal(by_index(4, "sample"), expected)
    assert torch.equal(by_index(7, "batch"), expected)
    found = torch.cat([by_index(1000, "none", seed, epoch) for seed in range(4) for epoch in range(4)])
    assert len(found.unique()) == 16_000
