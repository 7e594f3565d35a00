"""Samples that draw random numbers are a pure function of (seed, epoch, index), and no loader stores them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.samples import Made, WithEpochs
from vitmnist import from_dataloader, make_loader
from vitmnist.auditing import AuditDataset, find_leftovers, find_running
from vitmnist.data.sources import read_samples
from vitmnist.errors import ConfigError, DataError

CPU = torch.device("cpu")
ORDER: dict[str, Any] = {"batch_size": 4, "device": "cpu", "seed": 5}
NOISY = AuditDataset(23)


def test_each_generator_is_seeded_by_seed_epoch_and_index() -> None:
    """Draws of torch, NumPy and Python differ for any two triples, and repeat for the same triple."""
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
    ("options", "error", "raised", "message"),
    [
        ({"name": "disk", "num_workers": 0}, StopIteration, RuntimeError, "generator raised StopIteration"),
        ({"name": "disk", "num_workers": 1}, ConnectionResetError, ConnectionResetError, "the server is gone"),
    ],
)
def test_an_error_of_a_sample_is_raised_with_its_type_and_does_not_end_the_epoch(
    options: dict[str, Any], error: type[Exception], raised: type[Exception], message: str
) -> None:
    """The errors are a stray `next` of an iterator at its end, and a connection that breaks."""

    def fail(index: int) -> Any:
        if index == 9:
            raise error("the server is gone")
        return torch.zeros(1), index

    before = find_running()
    with make_loader(data=Made(fail, 12), **ORDER, **options) as loader:
        with pytest.raises(raised, match=message) as kept:
            list(loader.epoch(0))
        assert not find_leftovers(before)  # A stored traceback keeps no worker alive.
    assert kept.value.__traceback__ is not None


STORES: dict[str, Callable[[Any, Path], Any]] = {
    "ram": lambda data, _: make_loader("ram", data, **ORDER),
    "cache": lambda data, folder: make_loader("cache", data, folder=str(folder), **ORDER),
    "gpu_slice": lambda data, _: make_loader("gpu_slice", data, **ORDER),
    "from_dataloader": lambda data, _: from_dataloader(DataLoader(data, 4), "ram"),
}


@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_samples_that_seed_themselves_and_samples_with_nan_are_stored(store: Any, tmp_path: Path) -> None:
    def make(index: int) -> Any:
        torch.manual_seed(index)
        random.seed(index)
        return torch.tensor([torch.rand(()), random.random(), torch.nan]), index

    loader = store(Made(make, 20), tmp_path)
    for images, labels in loader if isinstance(loader, DataLoader) else loader.epoch(0):
        expected = torch.stack([make(int(label))[0] for label in labels])
        assert torch.equal(images.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize(("size", "every", "index"), [(100, 5, 6), (40, 1, 0)])
def test_randomness_that_no_generator_shows_is_found_in_probes(size: int, every: int, index: int) -> None:
    def make(index: int) -> Any:
        return torch.tensor(np.random.default_rng().random() if index % every == 1 % every else 0.0), index

    message = rf"sample {index} is random \(it differs when it is read again; .*\), and .*disk or"
    with pytest.raises(ConfigError, match=message):
        make_loader("ram", Made(make, size), **ORDER)


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_a_dataset_that_changes_in_set_epoch_is_refused(name: str) -> None:
    """Workers copy the dataset, and other loaders store its samples, so a call of `set_epoch` would do nothing."""
    for data in (WithEpochs(), Made(WithEpochs().__getitem__)):  # test_refusals has datasets of datasets.
        with pytest.raises(DataError, match="has set_epoch, so its samples change"):
            make_loader(name, data, **ORDER)
