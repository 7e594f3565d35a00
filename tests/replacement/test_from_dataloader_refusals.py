"""What a DataLoader over decoded samples cannot deliver as the original does is refused, and the reason is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Sampler, Subset
from torchvision import transforms

from tests.support.samples import SIZE, Made, Pairs
from vitmnist import from_dataloader
from vitmnist.errors import ConfigError, DataError


def test_samples_that_are_random_without_a_transform_are_refused() -> None:
    dataloader = DataLoader(Made(lambda index: torch.rand(2)), batch_size=10)
    message = "sample 0 is random apart from the transforms .* name the two steps with decode= and transform="
    with pytest.warns(UserWarning, match=f"returns the DataLoader as it is, undecoded: ram: {message}"):
        assert from_dataloader(dataloader) is dataloader
    for name, reason in (("ram", message), ("cache", message), ("gpu_slice", "sample 0 is random, and .*; use ram")):
        with pytest.raises(ConfigError, match=f"^{name}: {reason}"):
            from_dataloader(dataloader, name)


class Noise:
    def __call__(self, image: Tensor) -> Tensor:
        return image + torch.rand(())


class SeldomRandom(Pairs):
    """One sample, which no probe reads, is replaced by any other, as scripts do with a damaged picture."""

    def __init__(self, transform: Noise | None) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(random.randrange(SIZE) if index == 38 else index)
        return self.transform(image) if self.transform else image, label


@pytest.mark.parametrize(("workers", "transform"), [(0, None), (1, Noise())])
def test_a_single_sample_that_draws_a_random_number_when_it_is_read_is_refused(
    workers: int, transform: Noise | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitmnist.data.decoding.PROBES", 5)
    dataloader = DataLoader(SeldomRandom(transform), 7, num_workers=workers)
    with pytest.raises(DataError, match=r"^ram: one of the samples \d+ to \d+ draws a random number \(Python\) when"):
        from_dataloader(dataloader, "ram")


def test_a_collate_function_that_fails_is_named() -> None:
    dataloader = DataLoader(Pairs(), batch_size=20, collate_fn=lambda samples: {}[1])
    message = "ram: the collate function, for samples 0 to 15: <lambda> raised KeyError: 1$"
    with pytest.raises(DataError, match=f"^{message}"):
        from_dataloader(dataloader, "ram")
    with pytest.warns(UserWarning, match=f"undecoded: {message}"):
        assert from_dataloader(dataloader) is dataloader


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
        (DataLoader(Pairs(), batch_size=None), {}, "=None: the dataset makes whole batches itself, .*cannot divide"),
        ([1, 2], {}, r"must be a torch.utils.data.DataLoader, found list"),
        (DataLoader([]), {}, "its dataset is empty"),
        (DataLoader(WithEpochs()), {}, r"^dataloader: its dataset has set_epoch: its samples change; use the"),
        (Shuffled(Pairs()), {}, r"Shuffled iterates in its own way; give a plain DataLoader, such as"),
        (SimpleNamespace(loader=DataLoader(Pairs())), {}, r"SimpleNamespace wraps a DataLoader; give its \.loader"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_is_refused(dataloader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        from_dataloader(dataloader, **{"loader": "ram", **options})


@pytest.mark.parametrize("batch", [[1, -2], [SIZE], [(1, 64)], ["a"], [2**70], []])
def test_indices_that_cannot_be_looked_up_are_refused(batch: list[Any]) -> None:
    with pytest.raises(DataError, match=r"the sampler gives .* indices 0 to 42"):
        list(from_dataloader(DataLoader(Pairs(), batch_sampler=[[0], batch])))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sampler": ["a", "b"]}, "'a'"),
        ({"sampler": [0, SIZE], "batch_size": 2}, str(SIZE)),
        ({"batch_sampler": [[(2, 64), (3, 64)]]}, r"\(2, 64\)"),
    ],
)
def test_other_indices_are_named_before_the_dataset_is_read(settings: dict[str, Any], named: str) -> None:
    unread = Made(lambda index: pytest.fail("is read"), SIZE)
    message = rf"^dataloader: the sampler gives other indices than 0 to 42 \(such as {named}\)"
    with pytest.raises(ConfigError, match=message):
        from_dataloader(DataLoader(unread, **settings), "ram")


class Once(Sampler[int]):
    """A sampler with a state, which changes when an epoch begins."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter([self.epoch] * SIZE)

    def __len__(self) -> int:
        return SIZE


def test_the_sampler_is_not_advanced() -> None:
    loader = DataLoader(Pairs(), sampler=Once())
    assert next(iter(from_dataloader(loader, "ram")))[1].tolist() == [1]


def test_a_sampler_of_a_few_samples_is_a_warning() -> None:
    loader = DataLoader(Pairs(), sampler=[1, 2, 3])
    with pytest.warns(UserWarning, match="decodes all 43 samples of the dataset, of which the sampler gives 3 in an"):
        from_dataloader(loader, "ram")


def test_a_dataloader_over_the_decoded_samples_needs_the_collate_function() -> None:
    replacement = from_dataloader(DataLoader(Pairs(), 7))
    for dataset in (replacement.dataset, Subset(replacement.dataset, range(9))):
        with pytest.raises(ConfigError, match=r"needs collate_fn=loader\.collate_fn"):
            list(DataLoader(dataset, 7))


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


@pytest.mark.parametrize(
    ("dataset", "change", "named"),
    [
        (Pairs(), lambda dataset, collate: setattr(dataset, "epoch", 1), r"dataset\.epoch"),
        (Pairs(), lambda dataset, collate: setattr(dataset.original, "size", 3), r"dataset\.size"),
        (Pairs(), lambda dataset, collate: delattr(dataset.original, "epoch"), r"dataset\.epoch"),
        (Pairs(), lambda dataset, collate: setattr(collate, "scale", 2), r"collate_fn\.scale"),
        (
            Subset(ConcatDataset([Pairs()]), range(20)),
            lambda dataset, collate: setattr(dataset.dataset.datasets[0], "transform", str),
            r"dataset\.dataset\.datasets\[0\]\.transform",
        ),
        (Subset(Pairs(), range(20)), lambda dataset, collate: setattr(dataset, "indices", [1]), r"dataset\.indices"),
        # As a loop does that trains on larger images from epoch to epoch.
        (Composed(), lambda dataset, _: setattr(dataset.transforms[0], "scale", 2), r"dataset\.transforms\[0\]\.scale"),
        (Composed(), lambda dataset, collate: dataset.transforms.append(Scaled()), r"dataset\.transforms\[1\]"),
    ],
)
def test_an_attribute_that_the_loop_changes_is_named(
    dataset: Any, change: Callable[[Any, Any], None], named: str
) -> None:
    collate = Scaled()
    replacement = from_dataloader(DataLoader(copy.deepcopy(dataset), 7, collate_fn=collate))
    collate.scale = int("1")  # the same value
    assert list(replacement)
    change(replacement.dataset, collate)
    with pytest.raises(ConfigError, match=rf"^{named} has changed since the samples were decoded, .*; set it before"):
        list(replacement)


EPOCH = SCALE = SHIFT = 0
epoch = 0  # an attribute has this name too


def shifted(value: Any) -> Any:
    return next(value + SHIFT for _ in range(1))


class ReadsGlobals(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.transform = transforms.Lambda(lambda image: image * 2.0 ** (SCALE or 0))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(torch.full((2,), float(index))), self.label(index)

    def label(self, index: int) -> int:
        return index + self.epoch if EPOCH is not None else -1


def collate_shifted(samples: Any) -> Any:
    return shifted(torch.stack([image for image, _ in samples]))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["SCALE", "EPOCH", "SHIFT"])
def test_a_global_that_the_loop_changes_is_named(name: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(ReadsGlobals(), 7, collate_fn=collate_shifted, num_workers=workers)
    replacement = from_dataloader(loader, "ram")
    monkeypatch.setitem(globals(), "epoch", 3)
    assert list(replacement)
    monkeypatch.setitem(globals(), name, None)
    with pytest.raises(
        ConfigError, match=rf"^the global {name} of tests\S+ has changed since the samples were decoded"
    ):
        list(replacement)


def test_a_global_of_what_is_applied_each_time_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(samples: Any) -> Any:
        return [image + SHIFT for image, _ in samples]

    loader = DataLoader(ReadsGlobals(), 7, collate_fn=collate)
    replacement = from_dataloader(loader, "ram")
    monkeypatch.setitem(globals(), "SHIFT", 3)
    assert [batch[0].tolist() for batch in replacement] == [batch[0].tolist() for batch in loader]
