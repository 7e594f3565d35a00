"""Batches that have no row per sample come from samples that are kept one by one and collated as before."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.support.pictures import assert_same, run
from tests.support.samples import Made, Pairs
from vitmnist import from_dataloader
from vitmnist.data.difference import find_difference
from vitmnist.errors import ConfigError, DataError

tv_tensors = pytest.importorskip("torchvision.tv_tensors")


class Encoding(UserDict[str, Any]):
    """Like the `BatchEncoding` of tokenizers."""


class Graph:
    """An object without `__eq__`, which refers to itself."""

    def __init__(self, index: int) -> None:
        self.nodes, self.scale, self.own = torch.rand(index % 5, 2, generator=seeded(index)), float("nan"), self


class Marked(Tensor):
    """A tensor with an attribute, like MONAI's `MetaTensor`."""


def seeded(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def boxes(index: int) -> Any:
    image = torch.rand(7 + index % 3, 9, 3, generator=seeded(index)).permute(2, 0, 1)  # channels last in memory
    found = torch.rand(index % 4, 4, generator=seeded(index))
    target = {"boxes": tv_tensors.BoundingBoxes(found, format="XYXY", canvas_size=(7, 9)), "area": [1.0] * (index % 4)}
    return image, {**target, "caption": None} if index % 5 == 0 else target


def marked(index: int) -> Marked:
    tensor = torch.full((1 + index % 3,), float(index)).as_subclass(Marked)
    tensor.spacing = index / 7
    return tensor


def picture(index: int) -> Any:
    return Image.new("P", (3, 1 + index % 2), index), index


def pad(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def encoded(samples: list[Tensor]) -> Encoding:
    return Encoding(ids=pad(samples), lengths=[len(sample) for sample in samples])


def transposed(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


class Ranks:
    """A collate function of constant shape, whose result depends on the other samples of the batch."""

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([sample.sum() for sample in samples]).argsort()


MADE: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], Any]]] = {
    "padded text": (lambda index: torch.arange(1 + index % 7), pad),
    "padded text, nearly all of one length": (lambda index: torch.arange(3 if index == 37 else 7), pad),
    "encodings": (lambda index: torch.arange(1 + index % 7), encoded),
    "detection": (boxes, transposed),
    "list": (lambda index: Encoding(a=torch.ones(index % 3), b={1, index}), list),
    "objects": (Graph, list),
    "subclass": (marked, list),
    "one subclass": (lambda index: torch.ones(2).as_subclass(Marked), torch.stack),
    "palettes": (picture, list),
    "ranks": (lambda index: torch.tensor([index * 7 % 5, index]), Ranks()),
    "text": (lambda index: "a" * index, default_collate),
    "nothing": (lambda index: None, list),
    "sparse": (lambda index: torch.eye(2 + index % 3).to_sparse() * index, list),
    "graphs with a sparse adjacency": (lambda index: Encoding(adj_t=torch.eye(2 + index % 3).to_sparse_csr()), list),
    "stacked sparse": (lambda index: torch.eye(2).to_sparse() * index, torch.stack),
    "nested": (lambda index: torch.nested.nested_tensor([torch.ones(2) * index, torch.ones(3)]), list),
    "jagged": (lambda index: torch.nested.nested_tensor([torch.ones(2) * index], layout=torch.jagged), list),
    "requires_grad": (lambda index: torch.full((2,), float(index), requires_grad=True), list),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("make", "collate"), MADE.values(), ids=MADE.keys())
def test_batches_without_rows_are_those_of_the_original(
    make: Callable[[int], Any], collate: Callable[[list[Any]], Any], workers: int
) -> None:
    dataset = Made(make)
    loader = DataLoader(dataset, 7, shuffle=True, num_workers=workers, collate_fn=collate)
    replaced, expected = from_dataloader(loader, "ram"), run(loader)
    reads = dataset.reads
    assert_same(run(replaced), expected)
    assert dataset.reads == reads


@pytest.mark.parametrize(
    "collate",
    [
        lambda samples: torch.stack([sample for sample in samples if sample is not None]),
        lambda samples: [samples[place] for place in range(6)],
        lambda samples: (samples[::2], samples[1::2], samples[1]),
    ],
    ids=["without None", "a fixed size", "pairs"],
)
def test_a_collate_function_that_fails_for_one_sample(collate: Any) -> None:
    dataset = Made(lambda index: None if index % 9 == 0 else torch.full((2,), float(index)))
    loader = DataLoader(dataset, 6, True, drop_last=True, collate_fn=collate)
    assert_same(run(from_dataloader(loader, "ram")), run(loader))


def test_a_stacked_batch_still_requires_a_gradient() -> None:  # without workers, which torch refuses for it
    loader = DataLoader(Made(lambda index: torch.full((2,), float(index), requires_grad=True)), 7)
    replaced = from_dataloader(loader, "ram")
    assert next(iter(replaced)).requires_grad
    assert_same(run(replaced), run(loader))


def test_a_sample_that_is_changed_is_new_in_the_next_epoch() -> None:
    loader = from_dataloader(DataLoader(Made(boxes), 4, collate_fn=transposed), "ram")
    expected = run(loader, 1)
    for images, targets in loader:
        images[0].fill_(7)
        targets[1]["boxes"].fill_(7)
        targets[1]["area"].append(3)
    assert_same(run(loader, 1), expected)


def test_a_view_is_kept_without_the_rest_of_its_storage() -> None:
    waves = torch.rand(1000, 1000)
    for value in (waves[3], waves[3].numpy(), waves[3].as_subclass(Marked)):
        kept = from_dataloader(DataLoader([Encoding(wave=value)], collate_fn=list), "ram").dataset
        assert kept.sample_nbytes < 6000
        assert find_difference(kept[0], Encoding(wave=value)) is None


def test_differences_are_found_in_objects() -> None:
    assert find_difference(Graph(3), Graph(3)) is None
    assert find_difference(Graph(3), Graph(8))
    assert find_difference(Encoding(a=1.0), Encoding(a=1))
    assert find_difference(marked(3), marked(6))
    assert find_difference(marked(3), marked(3)) is None
    assert find_difference(torch.zeros(2, 3), torch.zeros(3, 2).T) == "batch"
    assert find_difference(float("nan"), float("nan")) is None
    assert find_difference(torch.ones(2, requires_grad=True), torch.ones(2)) == "batch"
    assert find_difference(torch.eye(2).to_sparse(), torch.eye(2).to_sparse() * 2) == "batch"


def test_what_cannot_be_pickled_is_named() -> None:
    class Local:
        pass

    def each_time(index: int) -> Any:
        class Each:
            pass

        return Each()

    value = Local()
    for make, name in (
        (lambda index: value, "Local"),
        (each_time, "Each"),
        (lambda index: (index, lambda: 0), r"<lambda>"),
    ):
        dataset = DataLoader(Made(make), 4, collate_fn=list)
        with pytest.raises(DataError, match=rf"^ram: a sample has \S+{name}, which cannot be pickled .*top level of"):
            from_dataloader(dataset, "ram")


def test_a_file_takes_plain_samples_only(tmp_path: Path) -> None:
    message = "^cache: .*a sample has a Graph; a file keeps only pictures, .*convert it, or use ram"
    with pytest.raises(DataError, match=message):
        from_dataloader(DataLoader(Made(Graph), 4, collate_fn=list), "cache", folder=str(tmp_path))
    plain = DataLoader(Made(lambda index: torch.arange(1 + index % 7)), 7, True, collate_fn=pad)
    assert_same(run(from_dataloader(plain, "cache", folder=str(tmp_path))), run(plain))


class RandomAtTimes(Pairs):
    """One sample, which no probe reads, differs each time; it draws no random number."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((3,), float(self.reads if index == 38 else index))


@pytest.mark.parametrize("collate", [default_collate, list])
def test_the_reason_for_a_difference_is_looked_for(collate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitmnist.data.decoding.PROBES", 5)
    message = "the DataLoader makes others each time: they are random at times, or"
    with pytest.raises(DataError, match=rf"^ram: .* of samples .* makes of them: {message}"):
        from_dataloader(DataLoader(RandomAtTimes(), 16, collate_fn=collate), "ram")


def test_gpu_slice_says_why_it_takes_rows_only() -> None:
    with pytest.raises(ConfigError, match=r"^gpu_slice: batch\['text'\]\[0\] is a str; ram keeps such samples"):
        from_dataloader(DataLoader(Pairs(), 4, collate_fn=lambda samples: {"text": ["a"]}), "gpu_slice")
