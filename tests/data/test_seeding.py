"""Samples that draw random numbers are a pure function of (seed, epoch, index), and no loader freezes them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from vitmnist import make_loader
from vitmnist.auditing.leftovers import left_since, running
from vitmnist.auditing.subject import ProbeDataset
from vitmnist.data.seeding import changed_generators, generator_states, read_samples
from vitmnist.errors import ConfigError

CPU = torch.device("cpu")
ORDER: dict[str, Any] = {"batch_size": 4, "device": "cpu", "seed": 5}
NOISY = ProbeDataset(23)


def digest(batches: list[Any]) -> str:
    content = b"".join(part.contiguous().numpy().tobytes() for batch in batches for part in batch)
    return hashlib.sha256(content).hexdigest()[:4]


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


def test_a_training_loop_draws_what_it_drew_before() -> None:
    """Neither does reading samples change the draws of the loop, nor the loop those of the samples."""

    def train(dropout: bool) -> tuple[str, list[float]]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        batches, drawn = [], []
        with make_loader("disk", NOISY, **ORDER, num_workers=0) as loader:
            for batch in loader.epoch(0):
                batches.append(batch)
                if dropout:
                    drawn += [torch.rand(1).item(), np.random.rand(), random.random()]
        return digest(batches), drawn

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    undisturbed = [draw() for _ in range(6) for draw in (lambda: torch.rand(1).item(), np.random.rand, random.random)]
    assert train(dropout=True) == (train(dropout=False)[0], undisturbed)


class Failing(Dataset[tuple[torch.Tensor, int]]):
    """Its sample 9 fails: by a stray `next` of an iterator that is at its end, or because a server is gone."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 9:
            raise self.error("the server is gone")
        return torch.zeros(1), index


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
    before = running()
    with make_loader(data=Failing(error), **ORDER, **options) as loader:
        with pytest.raises(raised, match=message) as kept:
            list(loader.epoch(0))
        assert not left_since(before)  # although the traceback refers to the iterator
    assert kept.value.__traceback__ is not None


def options_of(name: str, folder: Path) -> dict[str, Any]:
    return {"folder": str(folder)} if name == "cache" else {}


@pytest.mark.parametrize("name", ["ram", "cache"])
def test_a_loader_that_decodes_once_refuses_random_samples(name: str, tmp_path: Path) -> None:
    options = options_of(name, tmp_path)
    message = rf"^{name}: sample 0 differs between epochs 0 and 1.*disk or prefetch.*data/augment"
    with pytest.raises(ConfigError, match=message):
        make_loader(name, NOISY, **ORDER, **options)
    with pytest.raises(ConfigError, match=message):
        make_loader("prefetch", NOISY, **ORDER, base={"name": name, **options})


class Rarely(Dataset[tuple[torch.Tensor, int]]):
    """Erases one image in ten; or none, and then has a pixel that is not a number."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), 0.0 if torch.rand(1) < self.rate else torch.nan), index


def test_rare_randomness_is_found_and_what_is_not_random_is_not_refused() -> None:
    with pytest.raises(ConfigError, match=r"ram: sample \d+ differs between epochs 0 and 1"):
        make_loader("ram", Rarely(0.1), **ORDER)
    make_loader("ram", Rarely(0.0), **ORDER).close()
