"""A replaced DataLoader delivers its batches, bit for bit and in its order, or refuses."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

from vitmnist import from_dataloader
from vitmnist.data import from_dataloader as module
from vitmnist.data.batch_layout import find_difference
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime import memory
from vitmnist.runtime.memory import DoesNotFitError, Memory

SIZE = 43
KEPT = ("ram", "cache", "gpu_slice")
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
            "point": Point(float(index), np.float32("nan") if index == 3 else np.float32(index)),
            "nothing": torch.zeros(0),
        }


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

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


@pytest.mark.parametrize("name", [*KEPT, "prefetch", "auto"])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 10, "shuffle": True},
        {"batch_size": 1},
        {"batch_size": 7, "shuffle": True, "drop_last": True, "generator": torch.Generator()},
        {"batch_sampler": [[1, 2, 3], [5], list(range(30)), (7, 7)]},
        {"batch_size": 8, "sampler": WeightedRandomSampler(torch.arange(1.0, SIZE + 1), 50)},
    ],
    ids=["shuffled", "single samples", "generator", "batch sampler", "weighted"],
)
@pytest.mark.parametrize("dataset", [Nested(), Pairs()], ids=["nested", "pairs"])
def test_batches_and_order_are_those_of_the_dataloader(
    dataset: Dataset[Any], settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    dataloader = DataLoader(dataset, **settings)
    with from_dataloader(dataloader, name, folder=str(tmp_path), device="cpu") as replacement:
        assert len(replacement) == len(dataloader)
        generator = settings.get("generator")
        state = generator.get_state() if generator else None
        expected = epochs(dataloader)
        if generator:
            generator.set_state(state)
        assert_same(epochs(replacement), expected)
        assert replacement.dataset is dataset
        assert replacement.batch_size == dataloader.batch_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ram", "prefetch"])
def test_workers_decode_and_change_nothing(name: str) -> None:
    dataloader = DataLoader(Nested(), batch_size=10, shuffle=True, num_workers=2)
    with from_dataloader(dataloader, name, device="cpu") as replacement:
        assert_same(epochs(replacement), epochs(dataloader))


def test_set_epoch_of_a_distributed_sampler_changes_the_order() -> None:
    sampler = DistributedSampler(Pairs(), num_replicas=2, rank=1, seed=3)
    dataloader = DataLoader(Pairs(), batch_size=5, sampler=sampler)
    with from_dataloader(dataloader, "ram", device="cpu") as replacement:
        orders = []
        for number in (0, 1):
            sampler.set_epoch(number)
            assert_same([list(replacement)], [list(dataloader)])
            orders.append(torch.cat([labels for _, labels in replacement]))
    assert not torch.equal(*orders)


@pytest.mark.parametrize("name", KEPT)
def test_random_samples_are_refused_and_prefetch_leaves_them(name: str) -> None:
    dataloader = DataLoader(Random(), batch_size=10, num_workers=1)
    with pytest.raises(ConfigError, match=rf"^{name}: sample 0 is random: .* use loader='prefetch'"):
        from_dataloader(dataloader, name, device="cpu")
    with pytest.raises(ConfigError, match=r"^prefetch: sample 0 is random, and with num_workers=0"):
        from_dataloader(DataLoader(Random(), batch_size=10), "auto", device="cpu")
    with from_dataloader(dataloader, "auto", device="cpu") as replacement:
        assert replacement.loader == "prefetch"
        if name == "ram":  # once is enough: it starts workers
            assert_same(epochs(replacement), epochs(dataloader))


class Padding:
    """A collate function whose tensors are as long as the longest sample of the batch."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.ones(1 + label % 3) for _, label in samples], batch_first=True)


class Ranks:
    """A collate function of constant shape, whose result depends on the other samples of the batch."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.tensor([label for _, label in samples]).argsort()


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            Padding(),
            r"^ram: batch is torch.float32 \[3\] per sample in one batch, and torch.float32 \[2\] in another; use",
        ),
        (Ranks(), r"^ram: batch of samples 13, 4, 19, … is not what the .* use loader='prefetch'"),
        (
            lambda samples: {"text": ["a"] * len(samples)},
            r"batch\['text'\]\[0\] is a str, and only tensors can be kept",
        ),
        (lambda samples: [torch.zeros(())], r"batch\[0\] has shape \[\], which has no row per sample"),
        (lambda samples: None, r"batch is a NoneType|the batch has no tensor"),
    ],
    ids=["padding", "ranks", "text", "scalar", "nothing"],
)
def test_batches_that_are_no_rows_of_tensors_are_refused(collate: Any, message: str, tmp_path: Path) -> None:
    dataloader = DataLoader(Pairs(), batch_size=4, collate_fn=collate)
    with pytest.raises(DataError, match=message):
        from_dataloader(dataloader, "ram", device="cpu")
    with from_dataloader(dataloader, "auto", device="cpu") as replacement:
        assert replacement.loader == "prefetch"


class Truncated:
    """Pads to the longest sample, of which most have the greatest length: in a large batch there is always one."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.ones(min(1 + label, 5)) for _, label in samples], batch_first=True
        )


class Mixed:
    """Mixes each sample with another one, by a random share: a batch of one does not show it."""

    def __call__(self, samples: list[tuple[Tensor, int]]) -> Tensor:
        images = torch.stack([image.float() for image, _ in samples])
        return images.lerp(images.flip(0), torch.rand(()).item())


class Marked(Tensor):
    """A tensor that carries a meaning, as those of torchvision do."""


def test_batches_that_differ_only_sometimes_are_refused() -> None:
    with pytest.raises(DataError, match=r"ram: batch is torch\.float32"):
        from_dataloader(DataLoader(Pairs(), 20, collate_fn=Truncated()), "ram", device="cpu")
    for name in ("ram", "prefetch"):
        with pytest.raises(ConfigError, match=f"^{name}: the collate function is random"):
            from_dataloader(DataLoader(Pairs(), 20, collate_fn=Mixed()), name, device="cpu")
    as_marked = DataLoader(Pairs(), 20, collate_fn=lambda samples: torch.ones(len(samples)).as_subclass(Marked))
    with pytest.raises(DataError, match="batch is a Marked, and only tensors can be kept"):
        from_dataloader(as_marked, "ram", device="cpu")


def test_a_mapping_keeps_its_type_through_prefetch() -> None:
    dataloader = DataLoader(Pairs(), 20, collate_fn=lambda samples: OrderedDict(x=torch.ones(len(samples))))
    with from_dataloader(dataloader, "prefetch", device="cpu") as replacement:
        assert {type(batch) for batch in replacement} == {OrderedDict}


@pytest.mark.parametrize("name", ["ram", "prefetch"])
def test_random_generators_are_used_as_the_dataloader_uses_them(name: str) -> None:
    """Also by the loop, such as for dropout masks, while batches are made in the background."""
    masks = []
    for replaced in (False, True):
        dataloader = DataLoader(Pairs(), 1, shuffle=True)
        torch.manual_seed(2)
        loader = from_dataloader(dataloader, name, device="cpu") if replaced else dataloader
        torch.manual_seed(3)
        masks.append([torch.rand(4).tolist() for _ in loader])
    assert masks[0] == masks[1]


@pytest.mark.parametrize("end", [1, 4, 99])
@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_the_order_is_the_same_after_an_epoch_that_was_left_early(settings: dict[str, Any], end: int) -> None:
    orders = []
    for replaced in (False, True):
        generator = torch.Generator().manual_seed(1)
        dataloader = DataLoader(Pairs(), 7, shuffle=True, generator=generator, **settings)
        loader = from_dataloader(dataloader, "ram", device="cpu") if replaced else dataloader
        orders.append([[labels.tolist() for _, (_, labels) in zip(range(end), loader)] for _ in range(3)])  # noqa: B905
    assert orders[0] == orders[1]


class Shuffled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("dataloader", "name", "message"),
    [
        (
            DataLoader(Pairs()),
            "rem",
            r"^loader=rem: did you mean 'ram'\? allowed: auto, cache, gpu_slice, prefetch, ram",
        ),
        (DataLoader(Pairs()), "disk", r"^loader=disk: .*allowed"),
        (DataLoader(Endless()), "ram", "is an IterableDataset"),
        (DataLoader(Pairs(), batch_size=None), "ram", "batch_size=None leaves batches to the data set"),
        ([1, 2], "ram", "must be a torch.utils.data.DataLoader, found list"),
        (DataLoader([]), "ram", "its data set is empty"),
        (Shuffled(Pairs()), "ram", "Shuffled iterates in its own way"),
    ],
)
def test_what_cannot_be_replaced_is_refused(dataloader: Any, name: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        from_dataloader(dataloader, name, device="cpu")


def test_a_set_larger_than_memory_is_kept_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=SIZE))
    dataloader = DataLoader(Pairs(), batch_size=4)
    with pytest.raises(DoesNotFitError, match="ram: the set takes"):
        from_dataloader(dataloader, "ram", device="cpu")
    with from_dataloader(dataloader, "auto", device="cpu", folder=str(tmp_path)) as replacement:
        assert replacement.loader == "cache"
        assert_same([list(replacement)], [list(dataloader)])


def test_a_fingerprint_makes_the_cache_persistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # takes 2 s

    decoded = []
    decode = module._decode
    monkeypatch.setattr(module, "_decode", lambda *parts: decoded.append(1) or decode(*parts))
    rows = datasets.Dataset.from_dict({"x": [[float(row), 1.0] for row in range(SIZE)], "y": list(range(SIZE))})
    for change, times in ((lambda one: one, 1), (lambda one: one, 1), (lambda one: one.select(range(20)), 2)):
        dataloader = DataLoader(change(rows.with_format("torch")), batch_size=8, shuffle=True)
        with from_dataloader(dataloader, "cache", device="cpu", folder=str(tmp_path)) as replacement:
            assert_same(epochs(replacement), epochs(dataloader))
        assert len(decoded) == times
    for times in (3, 3):
        from_dataloader(DataLoader(Pairs()), "cache", device="cpu", folder=str(tmp_path), fingerprint="pairs 1").close()
        assert len(decoded) == times
    from_dataloader(DataLoader(Pairs()), "cache", device="cpu", folder=str(tmp_path)).close()
    assert len(decoded) == 4


def test_an_abandoned_epoch_leaves_no_thread() -> None:
    replacement = from_dataloader(DataLoader(Pairs(), batch_size=1), "prefetch", device="cpu")
    abandoned, kept = iter(replacement), iter(replacement)
    next(abandoned), next(kept)
    del abandoned
    replacement.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "vitmnist-prefetch"]


def test_batches_of_a_batch_sampler_may_grow() -> None:
    """Its page-locked buffers on a GPU start with the size of the first."""
    sampler = BatchSampler(range(SIZE), 40, drop_last=False)
    with from_dataloader(DataLoader(Pairs(), batch_sampler=sampler), "ram", device="cpu") as replacement:
        sampler.batch_size = 43
        assert [len(labels) for _, labels in replacement] == [43]


@pytest.mark.parametrize("batch", [[1, -2], [SIZE], [(1, 64)], ["a"]])
def test_indices_that_cannot_be_looked_up_are_refused(batch: list[Any]) -> None:
    dataloader = DataLoader(Pairs(), batch_sampler=[batch])
    with (
        from_dataloader(dataloader, "ram", device="cpu") as replacement,
        pytest.raises(DataError, match="the batch sampler gives"),
    ):
        list(replacement)
