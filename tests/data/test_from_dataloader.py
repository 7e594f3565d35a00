"""A DataLoader over decoded samples delivers the batches of the original, bit for bit and in its order, or refuses."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from vitmnist import from_dataloader
from vitmnist.data import decoded_cache
from vitmnist.data import from_dataloader as module
from vitmnist.data.batch_tensors import find_difference
from vitmnist.data.from_dataloader import DecodedDataset
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime import memory
from vitmnist.runtime.memory import DoesNotFitError, Memory

SIZE = 43
STORES = ("ram", "cache", "gpu_slice")
Point = namedtuple("Point", ["x", "y"])


class Nested(Dataset[Any]):
    """Samples of every structure and dtype that a batch may have, and one tensor with a NaN."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((3, 4, 5), index / 7),
            "pair": (index, torch.tensor([index, -index], dtype=torch.int16)),
            "flag": index % 2 == 0,
            "inner": {"half": torch.full((2,), index / 3, dtype=torch.bfloat16), "list": [index / 9]},
            "point": Point(float(index), np.float32("nan") if index == 3 else np.float32(index)),
            "nothing": torch.zeros(0),
        }


class Pairs(Dataset[Any]):
    classes = ("even", "odd")

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2, 2), index, dtype=torch.uint8), index


class Random(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(2), index


def epochs(loader: Any, number: int = 2) -> list[list[Any]]:
    torch.manual_seed(5)
    return [list(loader) for _ in range(number)]


def assert_same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    assert [len(epoch) for epoch in found] == [len(epoch) for epoch in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [find_difference(one, other) for one, other in zip(ours, theirs, strict=True)] == [None] * len(theirs)


def compare(build: Callable[[], DataLoader[Any]], run: Callable[[Any], Any], name: str = "ram", **options: Any) -> Any:
    """What `run` gives with the loader and with its replacement; both are equal, and the random state afterwards."""
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
    "nested": Nested(),
    "subset": Subset(ConcatDataset([Pairs(20), Pairs(30)]), range(3, 3 + SIZE)),
}


@pytest.mark.parametrize("name", [*STORES, "auto"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS.keys())
def test_batches_and_order_are_those_of_the_dataloader(
    dataset: Dataset[Any], settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    dataloader = DataLoader(dataset, **settings)
    replacement = from_dataloader(dataloader, name, folder=str(tmp_path))
    assert type(replacement) is DataLoader
    assert isinstance(replacement.dataset, DecodedDataset)
    assert len(replacement) == len(dataloader)
    generator = settings.get("generator")
    state = generator.get_state() if generator else None
    expected, after = epochs(dataloader), torch.get_rng_state()
    if generator:
        generator.set_state(state)
    assert_same(epochs(replacement), expected)
    assert torch.equal(torch.get_rng_state(), after)
    same = ("batch_size", "sampler", "drop_last", "generator") if dataloader.batch_size else ("batch_sampler",)
    assert [name for name in same if getattr(replacement, name) is not getattr(dataloader, name)] == []
    assert from_dataloader(replacement) is replacement


def test_set_epoch_of_a_distributed_sampler_changes_the_order() -> None:
    sampler = DistributedSampler(Pairs(), num_replicas=2, rank=1, seed=3)
    dataloader = DataLoader(Pairs(), batch_size=5, sampler=sampler)
    replacement = from_dataloader(dataloader)
    orders = []
    for number in (0, 1):
        sampler.set_epoch(number)
        assert_same([list(replacement)], [list(dataloader)])
        orders.append(labels_of(replacement))
    assert orders[0] != orders[1]


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "generator": torch.Generator()},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 7, drop_last=False)},
]


@pytest.mark.parametrize("end", [2, None])
@pytest.mark.parametrize("settings", WORKERS, ids=["none", "two", "generator", "persistent", "batch sampler"])
def test_the_order_is_the_same_with_workers_and_after_an_epoch_that_was_left_early(
    settings: dict[str, Any], end: int | None
) -> None:
    def build() -> DataLoader[Any]:
        if "generator" in settings:
            settings["generator"].manual_seed(1)
        batches = {} if "batch_sampler" in settings else {"batch_size": 7, "shuffle": True}
        return DataLoader(Pairs(), **batches, **settings)

    compare(build, lambda loader: [labels_of(loader, end) for _ in range(3)])


def test_workers_are_kept_only_where_the_order_depends_on_them() -> None:
    for settings, kept in ((WORKERS[1], 0), (WORKERS[2], 2), (WORKERS[3], 2)):
        dataloader = DataLoader(Pairs(), 7, shuffle=True, prefetch_factor=3, **settings)
        assert from_dataloader(dataloader).num_workers == kept
        assert from_dataloader(dataloader, num_workers=0).num_workers == 0
        assert from_dataloader(dataloader, num_workers=2).prefetch_factor == 3
    with pytest.raises(
        ConfigError, match=r"^gpu_slice: num_workers=2, and workers .* give from_dataloader num_workers"
    ):
        from_dataloader(dataloader, "gpu_slice")


@pytest.mark.slow  # a worker imports torch
@pytest.mark.parametrize("name", ["ram", "cache"])
def test_workers_that_are_spawned_deliver_the_same_batches(name: str, tmp_path: Path) -> None:
    dataloader = DataLoader(Nested(), 10, num_workers=1, multiprocessing_context="spawn")
    replacement = from_dataloader(dataloader, name, folder=str(tmp_path), num_workers=1)
    assert_same([list(replacement)], [list(DataLoader(Nested(), 10))])


USES: dict[str, Callable[[Any], Any]] = {
    "enumerate": lambda loader: [(number, labels.tolist()) for number, (_, labels) in enumerate(loader)],
    "two at once": lambda loader: [labels_of(one, 2) for one in (iter(loader), iter(loader))],
    "zip with itself": lambda loader: [
        (one[1].tolist(), other[1].tolist()) for one, other in zip(loader, loader, strict=True)
    ],
    "dropout": lambda loader: [(torch.rand(4).tolist(), labels.tolist()) for _, labels in loader],
    "next": lambda loader: [next(iter(loader))[1].tolist() for _ in range(2)],
    "copies": lambda loader: [labels_of(one) for one in (copy.copy(loader), copy.deepcopy(loader))],
    "pickle": lambda loader: labels_of(pickle.loads(pickle.dumps(loader))),
    "attributes": lambda loader: (len(loader), len(loader.dataset), loader.dataset.classes, loader.dataset.size),
    "sample": lambda loader: loader.dataset[4][1],
    "split": lambda loader: [
        labels_of(DataLoader(part, 5, shuffle=True, collate_fn=loader.collate_fn))
        for part in random_split(loader.dataset, [20, SIZE - 20])
    ],
    "concatenated": lambda loader: labels_of(
        DataLoader(ConcatDataset([loader.dataset, Pairs()]), 9, shuffle=True, collate_fn=loader.collate_fn)
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_whatever_is_done_with_the_loader_gives_what_the_original_gives(use: Callable[[Any], Any]) -> None:
    compare(lambda: DataLoader(Pairs(), 7, shuffle=True), use)


def test_two_loaders_over_one_dataset_in_lockstep() -> None:
    class Counted(Pairs):
        """Reading changes an attribute, which is no reason to refuse."""

        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.reads += 1
            return super().__getitem__(index)

    orders = []
    for is_replaced in (False, True):
        dataset = Counted()
        loaders = [DataLoader(dataset, size, shuffle=True) for size in (7, 5)]
        loaders = [from_dataloader(loader) for loader in loaders] if is_replaced else loaders
        torch.manual_seed(1)
        orders.append([[part.tolist() for _, part in both] for both in zip(*loaders, strict=False)])
    assert orders[0] == orders[1]


def test_an_exception_in_the_loop_leaves_the_next_epoch_as_it_would_be() -> None:
    def run(loader: Any) -> list[list[int]]:
        with pytest.raises(ZeroDivisionError):
            [1 / (3 - number) for number, _ in enumerate(loader)]
        return labels_of(loader)

    compare(lambda: DataLoader(Pairs(), 7, shuffle=True), run)


def test_a_dataloader_over_the_decoded_samples_needs_the_collate_function() -> None:
    replacement = from_dataloader(DataLoader(Pairs(), 7))
    for dataset in (replacement.dataset, Subset(replacement.dataset, range(9))):
        with pytest.raises(ConfigError, match=r"needs collate_fn=loader\.collate_fn"):
            list(DataLoader(dataset, 7))


def change_epoch(loader: Any) -> None:
    loader.dataset.epoch = 1


def change_wrapped(loader: Any) -> None:
    loader.dataset.dataset.datasets[0].transform = str


@pytest.mark.parametrize(
    ("dataset", "change", "named"),
    [
        (Pairs(), change_epoch, r"Pairs\.epoch"),
        (Pairs(), lambda loader: setattr(loader.dataset.original, "size", 3), r"Pairs\.size"),
        (Pairs(), lambda loader: delattr(loader.dataset.original, "epoch"), r"Pairs\.epoch"),
        (Subset(ConcatDataset([Pairs()]), range(20)), change_wrapped, r"Pairs\.transform"),
        (Subset(Pairs(), range(20)), lambda loader: setattr(loader.dataset, "indices", [1]), r"Subset\.indices"),
    ],
)
def test_an_attribute_that_the_loop_changes_is_named(dataset: Any, change: Callable[[Any], Any], named: str) -> None:
    replacement = from_dataloader(DataLoader(copy.deepcopy(dataset), 7))
    assert list(replacement)
    change(replacement)
    with pytest.raises(ConfigError, match=rf"^{named} has changed since the samples were decoded, .*; set it before"):
        list(replacement)


def test_an_attribute_that_is_set_to_the_same_value_changes_nothing() -> None:
    replacement = from_dataloader(DataLoader(Pairs(), 7))
    replacement.dataset.epoch = 0
    assert list(replacement)


NOISE = np.random.default_rng(1)


class OwnGenerators(Pairs):
    """Random samples from generators that belong to the dataset, its transform, or its module."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        numpy = np.random.RandomState(1)
        self.transforms = [lambda: 2 * numpy.rand()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        numbers = self.python.random(), self.transforms[0](), NOISE.random()
        return torch.rand(2, generator=self.torch) + torch.tensor(sum(numbers)), index


def test_probing_does_not_advance_the_generators_of_a_dataset() -> None:
    def build() -> DataLoader[Any]:
        NOISE.bit_generator.state = np.random.default_rng(1).bit_generator.state
        return DataLoader(OwnGenerators(), 7, shuffle=True)

    with pytest.warns(UserWarning, match="ram: sample 0 is random"):
        compare(build, lambda loader: [images.tolist() for images, _ in loader], "auto")


@pytest.mark.parametrize("name", [*STORES, "auto"])
def test_random_samples_are_refused(name: str) -> None:
    dataloader = DataLoader(Random(), batch_size=10, num_workers=2)
    if name == "auto":
        with pytest.warns(UserWarning, match=r"returns the DataLoader as it is, undecoded: ram: sample 0 is random"):
            assert from_dataloader(dataloader) is dataloader
    else:
        with pytest.raises(ConfigError, match=rf"^{name}: sample 0 is random: .*; move the random transform"):
            from_dataloader(dataloader, name, num_workers=0)


class Padding:
    """A collate function whose tensors are as long as the longest sample of the batch."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.ones(1 + label % 3) for _, label in samples], batch_first=True)


class Truncated:
    """Pads to the longest sample, of which most have the greatest length: in a large batch there is always one."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.ones(min(1 + label, 5)) for _, label in samples], batch_first=True
        )


class Ranks:
    """A collate function of constant shape, whose result depends on the other samples of the batch."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.tensor([label for _, label in samples]).argsort()


class Mixed:
    """Mixes each sample with another one, by a random share: a batch of one does not show it."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        images = torch.stack([image.float() for image, _ in samples])
        return images.lerp(images.flip(0), torch.rand(()).item())


class Marked(Tensor):
    """A tensor that carries a meaning, as those of torchvision do."""


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (Padding(), r"batch is torch.float32 \[3\] per sample in one batch, and torch.float32 \[2\] in another"),
        (Truncated(), r"batch is torch\.float32"),
        (Ranks(), r"batch of samples \d+, \d+, \d+, … is not what the "),
        (Mixed(), r"the collate function is random"),
        (lambda samples: {"text": ["a"] * len(samples)}, r"batch\['text'\]\[0\] is a str; only tensors in dicts, "),
        (lambda samples: [torch.zeros(())], r"batch\[0\] has shape \[\], which has no row per sample"),
        (lambda samples: None, r"batch is a NoneType|the batch has no tensor"),
        (lambda samples: torch.ones(len(samples)).as_subclass(Marked), "batch is a Marked; only tensors"),
        (lambda samples: {}[1], "KeyError: 1"),
    ],
)
def test_batches_that_are_no_rows_of_tensors_are_refused(collate: Any, message: str) -> None:
    dataloader = DataLoader(Pairs(), batch_size=20, collate_fn=collate)
    with pytest.raises((DataError, ConfigError), match=f"^ram: {message}"):
        from_dataloader(dataloader, "ram")
    with pytest.warns(UserWarning, match=f"undecoded: ram: {message}"):
        assert from_dataloader(dataloader) is dataloader


def test_a_mapping_keeps_its_type() -> None:
    dataloader = DataLoader(Pairs(), 20, collate_fn=lambda samples: OrderedDict(x=torch.ones(len(samples))))
    assert {type(batch) for batch in from_dataloader(dataloader)} == {OrderedDict}


class Shuffled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class WithEpochs(Pairs):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(
    ("dataloader", "options", "message"),
    [
        (DataLoader(Pairs()), {"loader": "rem"}, r"^loader=rem: did you mean 'ram'\? allowed: auto, cache, gpu_slice"),
        (DataLoader(Pairs()), {"loader": "disk"}, r"^loader=disk: .*allowed"),
        (DataLoader(Pairs()), {"device": "cpu"}, r"^device=cpu: ram delivers batches on the host; leave device out"),
        (DataLoader(Endless()), {}, r"is an IterableDataset.*; use the DataLoader as it is"),
        (DataLoader(Pairs(), batch_size=None), {}, "batch_size=None leaves batches to the dataset; give it"),
        ([1, 2], {}, r"must be a torch.utils.data.DataLoader, found list"),
        (DataLoader([]), {}, "its dataset is empty"),
        (DataLoader(WithEpochs()), {}, r"^ram: the dataset has set_epoch: its samples change; use the DataLoader as"),
        (Shuffled(Pairs()), {}, r"Shuffled iterates in its own way; give the DataLoader that it was made of"),
        (SimpleNamespace(loader=DataLoader(Pairs())), {}, r"SimpleNamespace wraps a DataLoader; give its \.loader"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_is_refused(dataloader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        from_dataloader(dataloader, **{"loader": "ram", **options})


@pytest.mark.parametrize("batch", [[1, -2], [SIZE], [(1, 64)], ["a"], [2**70], []])
def test_indices_that_cannot_be_looked_up_are_refused(batch: list[Any]) -> None:
    with pytest.raises(DataError, match=r"the sampler gives .* indices 0 to 42"):
        list(from_dataloader(DataLoader(Pairs(), batch_sampler=[batch])))


def test_a_set_larger_than_memory_is_kept_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=SIZE))
    dataloader = DataLoader(Pairs(), batch_size=4)
    for name in ("ram", "gpu_slice"):
        with pytest.raises(DoesNotFitError, match=f"^{name}: the set takes"):
            from_dataloader(dataloader, name)
    written = []
    monkeypatch.setattr(module, "decode_temporarily", lambda *parts: written.append(1) or unpatched(*parts))
    assert_same([list(from_dataloader(dataloader, folder=str(tmp_path)))], [list(dataloader)])
    assert written
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(decoded_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=SIZE))
    monkeypatch.setattr(decoded_cache, "_write_headers", lambda *parts: pytest.fail("written"))
    with pytest.raises(DoesNotFitError, match=r"cache: .* on the disk of .*; name a folder on another disk"):
        from_dataloader(dataloader, "cache", folder=str(tmp_path))
    with pytest.warns(UserWarning, match=r"undecoded: cache: the decoded set takes"):
        assert from_dataloader(dataloader, folder=str(tmp_path)) is dataloader


unpatched = module.decode_temporarily


def test_a_fingerprint_makes_the_cache_persistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # takes 2 s

    decoded = []
    chunks = module._chunks
    monkeypatch.setattr(module, "_chunks", lambda *parts: decoded.append(1) or chunks(*parts))

    def in_cache(dataloader: DataLoader[Any], **options: Any) -> DataLoader[Any]:
        return from_dataloader(dataloader, "cache", folder=str(tmp_path), **options)

    rows = datasets.Dataset.from_dict({"x": [[float(row), 1.0] for row in range(SIZE)], "y": list(range(SIZE))})
    for change, times in ((lambda one: one, 1), (lambda one: one, 1), (lambda one: one.select(range(20)), 2)):
        dataloader = DataLoader(change(rows.with_format("torch")), batch_size=8, shuffle=True)
        assert_same(epochs(in_cache(dataloader)), epochs(dataloader))
        assert len(decoded) == times
    for times in (3, 3):
        in_cache(DataLoader(Pairs()), fingerprint="pairs 1")
        assert len(decoded) == times
    with pytest.raises(DataError, match=r"fingerprint= names other contents \(give another"):
        in_cache(DataLoader([(torch.zeros(2, 2, dtype=torch.uint8), 1)] * SIZE), fingerprint="pairs 1")
    in_cache(DataLoader(Pairs()))
    assert len(decoded) == 4


class Scaled:
    """A transform, and a collate function, with an attribute that the loop may change."""

    def __init__(self) -> None:
        self.scale = 1

    def __call__(self, value: Any) -> Any:
        return torch.utils.data.default_collate(value) if isinstance(value, list) else value * self.scale


class Composed(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.transforms = [Scaled()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transforms[0](torch.full((2, 2), float(index))), index


@pytest.mark.parametrize("changed", ["a transform", "the list of transforms", "the collate function"])
def test_what_the_loop_changes_within_transforms_and_collate_function_is_an_error(changed: str) -> None:
    """As a loop does that trains on larger images from epoch to epoch."""
    dataset, collate = Composed(), Scaled()
    loader = from_dataloader(DataLoader(dataset, 4, collate_fn=collate), "ram")
    assert len(list(loader)) == 11
    if changed == "a transform":
        dataset.transforms[0].scale = 2
    elif changed == "the list of transforms":
        dataset.transforms.append(Scaled())
    else:
        collate.scale = 2
    with pytest.raises(ConfigError, match=r"(Scaled\.scale|Composed\.transforms) has changed since"):
        list(loader)
