"""Samples that draw random numbers are a pure function of (seed, epoch, index), and no loader freezes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.auditing import ProbeDataset, left_since, running
from vitmnist.data.seeding import changed_generators, generator_states, read_samples
from vitmnist.errors import ConfigError

CPU = torch.device("cpu")
ORDER: dict[str, Any] = {"batch_size": 4, "device": "cpu", "seed": 5}
NOISY = ProbeDataset(23)


def test_each_generator_is_seeded_by_seed_epoch_and_index() -> None:
    """Torch's, NumPy's and Python's draws differ between any two of them, and come again for the same three numbers."""
    draws = {
        (seed, epoch, index): tuple(read_samples(NOISY, [index], seed, epoch)[0][1].tolist())
        for seed in (0, 1, 2**63)
        for epoch in (0, 1)
        for index in (0, 1)
    }
    for place in range(3):
        assert len({values[place] for values in draws.values()}) == len(draws)
    assert read_samples(NOISY, [1, 0], 1, 1)[1][1].tolist() == list(draws[1, 1, 0])


@pytest.mark.parametrize(
    ("name", "draw"), [("torch", lambda: torch.rand(1)), ("NumPy", np.random.rand), ("Python", random.random)]
)
def test_a_single_draw_changes_a_generator(name: str, draw: Callable[[], object]) -> None:
    np.random.rand()  # NumPy's next draw moves its position only
    before = generator_states()
    assert not changed_generators(before)
    draw()
    assert changed_generators(before) == [name]


@pytest.mark.parametrize(
    ("options", "error", "raised", "message"),
    [
        ({"name": "disk", "num_workers": 0}, StopIteration, RuntimeError, "sample 9 of the dataset raised StopIter"),
        ({"name": "prefetch"}, StopIteration, RuntimeError, "sample 9 of the dataset raised StopIteration"),
        ({"name": "disk", "num_workers": 1}, ConnectionResetError, ConnectionResetError, "the server is gone"),
    ],
)
def test_an_error_of_a_sample_neither_ends_the_epoch_nor_is_taken_for_a_dead_worker(
    options: dict[str, Any], error: type[Exception], raised: type[Exception], message: str
) -> None:
    """By a stray `next` of an iterator that is at its end, or because a server is gone."""

    def fail(index: int) -> Any:
        if index == 9:
            raise error("the server is gone")
        return torch.zeros(1), index

    before = running()
    with make_loader(data=Made(fail, 12), **ORDER, **options) as loader:
        with pytest.raises(raised, match=message) as kept:
            list(loader.epoch(0))
        assert not left_since(before)  # although the traceback refers to the iterator
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("name", ["ram", "cache"])
def test_a_loader_that_decodes_once_refuses_random_samples(name: str, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)} if name == "cache" else {}
    message = rf"^{name}: sample 0 differs between epochs 0 and 1.*disk or prefetch.*data/augment"
    with pytest.raises(ConfigError, match=message):
        make_loader(name, NOISY, **ORDER, **options)
    with pytest.raises(ConfigError, match=message):
        make_loader("prefetch", NOISY, **ORDER, base={"name": name, **options})


def test_rare_randomness_is_found_and_what_is_not_random_is_not_refused() -> None:
    """One image in ten is erased; or none, and then has a pixel that is not a number."""
    rarely, never = (
        Made(lambda index, rate=rate: (torch.full((2,), 0.0 if torch.rand(1) < rate else torch.nan), index), 500)
        for rate in (0.1, 0.0)
    )
    with pytest.raises(ConfigError, match=r"ram: sample \d+ differs between epochs 0 and 1"):
        make_loader("ram", rarely, **ORDER)
    make_loader("ram", never, **ORDER).close()
