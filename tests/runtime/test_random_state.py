"""The seeds of ranks."""

import numpy as np
import torch

from vitmnist.runtime.random_state import seed_rank


def test_no_rank_has_the_seed_of_an_epoch() -> None:
    seeds = []
    for rank in range(3):
        seed_rank(7, rank)
        seeds.append(torch.initial_seed() % 2**32)  # Torch's generator uses only these bits.
    assert seeds == [7, 2032283795, 1577427517]  # Published results can only be repeated with the same seeds.
    orders = [np.random.SeedSequence(7, spawn_key=(epoch,)).generate_state(1)[0] for epoch in range(3)]
    assert len({*seeds, *orders}) == 6
