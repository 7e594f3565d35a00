"""A DataLoader over decoded samples delivers the batches of the original, bit for bit and in its order."""

import copy
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torchvision.transforms import Compose, RandomCrop, Resize, ToTensor

from tests.support.pictures import Pictures, assert_same, check_same, collect
from tests.support.samples import SIZE, Made, Pairs
from vitmnist import from_dataloader
from vitmnist.errors import DataError
from vitmnist.replacement import original_dataloader as original
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, DecodedDataset
from vitmnist.replacement.row_dataset import RowDataset
from vitmnist.runtime import memory
from vitmnist.runtime.memory import OutOfSpaceError
from vitmnist.store import cache_file

CROP = Compose([RandomCrop(8), ToTensor()])
Point = namedtuple("Point", ["x", "y"])


def nested(index: int) -> dict[str, Any]:
    """A sample with every structure and dtype that a batch may have. One sample has a NaN."""
    return {
        "image": torch.full((3, 4, 5), index / 7),
        "pair": (index, torch.tensor([index, -index], dtype=torch.int16)),
        "flag": index % 2 == 0,
        "inner": OrderedDict(half=torch.full((2,), index / 3, dtype=torch.float16), list=[index / 9]),
        "point": Point(float(index), np.float32("nan") if index == 3 else np.float32(index)),
        "nothing": torch.zeros(0),
    }


def compare(build: Callable[[], DataLoader[Any]], run: Callable[[Any], Any], name: str = "ram", **options: Any) -> Any:
    """Assert that `run` returns the same with a loader and with its replacement, and leaves the same random state."""
    results = []
    for is_replaced in (False, True):
        loader = build()
        torch.manual_seed(2)
        loader = from_dataloader(loader, name, **options) if is_replaced else loader
        torch.manual_seed(3)
        results.append((run(loader), torch.get_rng_state().tolist()))
    assert results[0] == results[1]
    return results[0][0]


def labels_of(loader: Any, end: int | None = None) -> list[list[int]]:
    return [labels.tolist() for _, labels in islice(loader, end)]


SETTINGS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 10, "shuffle": True},
    "single samples": {"batch_size": 1},
    "generator": {"batch_size": 7, "shuffle": True, "drop_last": True, "generator": torch.Generator()},
    "batch sampler": {"batch_sampler": [[1, 2, 3], [5], list(range(30)), (7, 7)]},
    "torch's batch sampler": {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 9, drop_last=True)},
    "weighted": {"batch_size": 8, "sampler": WeightedRandomSampler(torch.arange(1.0, SIZE + 1), 50)},
    "subset": {"batch_size": 8, "sampler": SubsetRandomSampler(range(7, 30))},
    "replacement": {"batch_size": 8, "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=50)},
}
DATASETS: dict[str, Dataset[Any]] = {
    "nested": Made(nested, SIZE),
    "subset": Subset(ConcatDataset([Pairs(20), Pairs(30)]), range(3, 3 + SIZE)),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS.keys())
def test_batches_and_order_match_the_dataloader(
    dataset: Dataset[Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    dataloader, generator = DataLoader(dataset, **settings), settings.get("generator")
    state = generator.get_state() if generator else None
    expected, after = collect(dataloader), torch.get_rng_state()
    for name in ("ram", "cache"):
        replacement = from_dataloader(dataloader, name, folder=str(tmp_path))
        assert type(replacement) is DecodedDataLoader
        assert isinstance(replacement.dataset, DecodedDataset)
        assert len(replacement) == len(dataloader)
        if generator:
            generator.set_state(state)
        assert_same(collect(replacement), expected)
        assert torch.equal(torch.get_rng_state(), after)
        same = ("batch_size", "sampler", "drop_last", "generator") if dataloader.batch_size else ("batch_sampler",)
        assert [name for name in same if getattr(replacement, name) is not getattr(dataloader, name)] == []
        assert from_dataloader(replacement) is replacement


@pytest.mark.parametrize("is_random", [False, True])
def test_set_epoch_of_a_distributed_sampler_changes_the_order(is_random: bool, folder: Path) -> None:
    dataset = Pictures(folder, CROP) if is_random else Pairs()
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=3)
        dataloader = DataLoader(dataset, batch_size=5, sampler=sampler)
        replacement = from_dataloader(dataloader)
        orders = []
        for number in (0, 1):
            sampler.set_epoch(number)
            assert_same(collect(replacement, 1), collect(dataloader, 1))
            orders.append(labels_of(replacement))
        assert orders[0] != orders[1]


WORKERS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 0),
    "two": ({"num_workers": 2}, 0),
    "generator": ({"num_workers": 2, "generator": torch.Generator()}, 2),
    "persistent": ({"num_workers": 2, "persistent_workers": True}, 2),
    "batch sampler": ({"num_workers": 1, "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 7, False)}, 1),
}


@pytest.mark.parametrize(("settings", "kept"), WORKERS.values(), ids=WORKERS.keys())
def test_the_order_is_drawn_when_the_original_draws_it_with_any_workers(settings: dict[str, Any], kept: int) -> None:
    """A replacement has workers only if the order depends on them."""

    def build() -> DataLoader[Any]:
        if "generator" in settings:
            settings["generator"].manual_seed(1)
        batches = {} if "batch_sampler" in settings else {"batch_size": 7, "shuffle": True}
        return DataLoader(Pairs(), **batches, **settings, prefetch_factor=3 if settings else None)

    def begin_and_draw(loader: Any, end: int | None) -> list[list[int]]:
        """With workers, `iter` draws the order because it reads ahead. Without workers, the first `next` draws it."""
        batches = iter(loader)
        torch.rand(1)  # For example, the weights of a model
        return labels_of(batches, end)

    compare(build, lambda loader: [begin_and_draw(loader, end) for end in (2, None, None)])
    replaced = from_dataloader(build())
    assert (replaced.num_workers, replaced.prefetch_factor) == (kept, 3 if kept else None)


def after_an_exception(loader: Any) -> list[list[int]]:
    with pytest.raises(ZeroDivisionError):
        [1 / (3 - batch_index) for batch_index, _ in enumerate(loader)]
    return labels_of(loader)


USES: dict[str, Callable[[Any], Any]] = {
    "two iterators": lambda loader: [labels_of(batches, 2) for batches in (iter(loader), iter(loader))],
    "zip": lambda loader: [
        (first[1].tolist(), second[1].tolist()) for first, second in zip(loader, loader, strict=True)
    ],
    "draws as of dropout": lambda loader: [(torch.rand(4).tolist(), labels.tolist()) for _, labels in loader],
    "a new epoch after an exception": after_an_exception,
    "copies": lambda loader: [labels_of(copied) for copied in (copy.copy(loader), copy.deepcopy(loader))],
    "pickle": lambda loader: labels_of(pickle.loads(pickle.dumps(loader))),
    "attributes of the dataset": lambda loader: (len(data := loader.dataset), data.classes, data.size, data[4][1]),
    "its dataset split and concatenated": lambda loader: [
        labels_of(DataLoader(part, 5, shuffle=True, collate_fn=loader.collate_fn))
        for part in (*random_split(loader.dataset, [20, SIZE - 20]), ConcatDataset([loader.dataset, Pairs()]))
    ],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_replacement_can_be_used_like_the_original(use: Callable[[Any], Any]) -> None:
    compare(lambda: DataLoader(Pairs(), 7, shuffle=True), use)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_dataset_larger_than_memory_is_stored_in_a_file(
    is_random: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is too small too, the original is returned, and no file is left."""
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: SIZE)
    dataloader = DataLoader(Pictures(folder, CROP) if is_random else Pairs(), batch_size=4)
    size = r"[\d.]+ MiB"
    with pytest.raises(OutOfSpaceError, match=rf"^ram: the .*dataset takes {size} .*, where {size} are free"):
        from_dataloader(dataloader, "ram")
    replaced = from_dataloader(dataloader, folder=str(tmp_path))
    assert isinstance(replaced.dataset, DecodedDataset)
    assert_same(collect(replaced), collect(dataloader))
    monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=SIZE))
    with pytest.raises(OutOfSpaceError, match=r"cache: .* on the disk of .*; name a folder on another disk"):
        from_dataloader(dataloader, "cache", folder=str(tmp_path))
    with pytest.warns(UserWarning, match=r"undecoded: cache: the decoded dataset takes"):
        assert from_dataloader(dataloader, folder=str(tmp_path)) is dataloader
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transforms", [CROP.transforms, [Resize((8, 8)), ToTensor()]], ids=["random", "fixed"])
def test_later_replacements_find_the_file_by_its_fingerprint(
    transforms: list[Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, read_in_chunks = [], original.read_in_chunks
    monkeypatch.setattr(original, "read_in_chunks", lambda *parts: decoded.append(1) or read_in_chunks(*parts))
    stored: dict[str, Any] = {"loader": "cache", "folder": str(tmp_path), "fingerprint": "pictures"}
    for _ in range(2):
        dataset = Pictures(folder, Compose(transforms))
        check_same(lambda dataset=dataset: DataLoader(dataset, 4, shuffle=True), **stored)
        assert len(decoded) == 1
    dataset.paths.reverse()
    with pytest.raises(DataError, match=r"differs from the DataLoader's: fingerprint= does not fit"):
        from_dataloader(DataLoader(dataset, 4), **stored)
    check_same(lambda: DataLoader(dataset, 4, shuffle=True), loader="cache", folder=str(tmp_path))
    assert len(decoded) == 2


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


def test_samplers_without_a_length_or_a_batch_are_accepted() -> None:
    original = DataLoader(Pairs(), 4, sampler=Unsized())
    replaced = from_dataloader(original, "ram")
    assert_same(collect(replaced), collect(original))
    none = from_dataloader(DataLoader(Pairs(3), 4, drop_last=True), "ram")
    assert isinstance(none.dataset, RowDataset)
    assert list(none) == []
