"""A DataLoader that cannot be replaced exactly is refused, and the message names the cause."""

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, get_worker_info
from torchvision import transforms as v1

from tests.support.pictures import Pictures, assert_same, collect, replaced_as_well, write_pictures
from tests.support.samples import SIZE, Made, Pairs, WithEpochs
from vitmnist import from_dataloader
from vitmnist.errors import ConfigError, DataError


def test_samples_that_are_random_without_a_transform_are_refused() -> None:
    dataloader = DataLoader(Made(lambda index: torch.rand(2)), batch_size=10)
    message = "sample 0 is random .* apart from the transforms .*; move all random steps there, or use"
    with pytest.warns(UserWarning, match=f"returns the DataLoader as it is, undecoded: ram: {message}"):
        assert from_dataloader(dataloader) is dataloader
    with pytest.raises(ConfigError, match=f"^ram: {message}"):
        from_dataloader(dataloader, transforms="tensor")
    for name in ("ram", "cache"):
        with pytest.raises(ConfigError, match=f"^{name}: {message}"):
            from_dataloader(dataloader, name)


class SeldomRandom(Pairs):
    """One sample that is no probe is replaced by a random one, as scripts do with a damaged picture."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(random.randrange(SIZE) if index == 38 else index)


def add_noise_seldom(image: Tensor) -> Tensor:
    """Random for one sample, as a random crop is for the only image that is larger than the crop."""
    return image + (torch.rand(()) if image[0, 0] == 38 else 0.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_single_random_sample_is_never_stored(workers: int) -> None:
    for dataset, generator in ((SeldomRandom(), "Python"), (Transformed(add_noise_seldom), "torch")):
        message = rf"^ram: sample 38 is random \(it draws from {generator}\) apart from the transforms"
        with pytest.raises(ConfigError, match=message):
            from_dataloader(DataLoader(dataset, 7, num_workers=workers), "ram")


class Shuffled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("dataloader", "options", "message"),
    [
        (DataLoader(Pairs()), {"loader": "rem"}, r"^loader=rem: did you mean 'ram'\? allowed: auto, cache, ram"),
        (DataLoader(Pairs()), {"transforms": "tensors"}, r"^transforms=tensors: did you mean 'tensor'\? allow"),
        (DataLoader(Endless()), {}, r"is an IterableDataset.*; use the DataLoader as it is"),
        (DataLoader(Pairs(), batch_size=None), {}, r"^dataloader: batch_size=None: its dataset makes whole batches"),
        ([1, 2], {}, r"must be a torch.utils.data.DataLoader, found list"),
        *(
            (DataLoader(dataset), {}, r"^dataloader: its dataset has set_epoch, so its samples change; use")
            for dataset in (WithEpochs(), Subset(WithEpochs(), range(9)), ConcatDataset([Pairs(), WithEpochs()]))
        ),
        (Shuffled(Pairs()), {}, r"Shuffled iterates in its own way; give a plain DataLoader, such as"),
        (SimpleNamespace(loader=DataLoader(Pairs())), {}, r"found SimpleNamespace; give the DataLoader that"),
        (
            DataLoader(Pairs(), 20, collate_fn=lambda samples: {}[1]),
            {},
            "^ram: the collate function, for samples 0, 2, 5, …: <lambda> raised KeyError: 1$",
        ),
    ],
)  # fmt: skip
def test_loaders_that_cannot_be_replaced_are_refused(dataloader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        from_dataloader(dataloader, **{"loader": "ram", **options})


@pytest.mark.parametrize("batch", [[1, -2], [(1, 2)], [SIZE], [0.5], ["1"]])
def test_indices_that_cannot_be_looked_up_are_refused(batch: list[Any], folder: Path) -> None:
    with pytest.raises(DataError, match=r"^the sampler gives .*, not only 0 to 42; use the DataLoader as it is"):
        list(from_dataloader(DataLoader(Pairs(), batch_sampler=[[0], batch])))
    for transforms in ("exact", "tensor") if batch in ([1, -2], [(1, 2)]) else ():
        kept = from_dataloader(DataLoader(Pictures(folder, FLIP), batch_sampler=[batch]), "ram", transforms=transforms)
        with pytest.raises(DataError, match=r"the sampler gives (-2|\(1, 2\)), not only 0 to \d+; use the"):
            list(kept)


class Stateful:
    """A transform or collate function that changes with a counter, with a lazily filled cache and a generator.

    Args:
        is_random: use the generator.
    """

    def __init__(self, is_random: bool = False) -> None:
        self.is_random, self.scale, self.calls = is_random, 1, 0
        self.numbers, self.cache = np.random.default_rng(3), dict[int, Tensor]()

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        if isinstance(value, list):
            return torch.utils.data.default_collate(value)[0].repeat(1, 1 + self.calls // 5, 1)
        scaled = self.cache.setdefault(int(value[0, 0]), value.float() * self.scale) + (self.calls > 60)
        return scaled + self.numbers.random() if self.is_random else scaled


class Transformed(Pairs):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.transform = v1.Compose(list(parts))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return self.transform(image), label


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [[False], [True], [False, True]], ids=["deterministic", "random", "both"])
def test_state_of_transforms_and_collate_functions_goes_on_as_in_the_original(parts: list[bool], workers: int) -> None:
    def build() -> DataLoader[Any]:
        dataset = Transformed(*map(Stateful, parts))
        return DataLoader(dataset, 7, shuffle=True, num_workers=workers, collate_fn=Stateful())

    original, replaced = replaced_as_well(build)
    assert not any(part.calls for part in replaced.dataset.transform.transforms)
    assert_same(collect(replaced, 3), collect(original, 3))
    for part in replaced.dataset.transform.transforms:
        part(torch.full((2, 2), 99))  # As another loader that shares the transform does
    assert len(list(replaced)) == len(original)


class Scaled:
    """A transform whose `repr` does not show its attribute."""

    factor = 1

    def __call__(self, image: Tensor) -> Tensor:
        return image * self.factor


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda dataset: setattr(dataset, "transform", str), "str"),
        (lambda dataset: dataset.transform.transforms.append(len), "len"),
        (lambda dataset: setattr(dataset.transform.transforms[0], "size", [3, 3]), "Resize"),
        (lambda dataset: setattr(dataset.transform.transforms[1], "factor", 2), "Scaled.factor"),
        (lambda dataset: setattr(dataset, "epoch", 1), "Transformed.epoch"),
    ],
    ids=["replaced", "appended", "resized for larger images in later epochs", "without repr", "dataset"],
)
def test_a_transform_that_the_loop_changes_is_named(change: Callable[[Any], None], named: str) -> None:
    for live in ([], [Stateful(is_random=True)]):
        parts = [v1.Resize((2, 2)), Scaled(), *live]
        replacement = from_dataloader(DataLoader(Subset(Transformed(*parts), range(20)), 7))
        assert list(replacement)
        change(replacement.dataset.dataset)
        with pytest.raises(ConfigError, match=rf"^{named} has changed since the samples were decoded; set it"):
            list(replacement)


def set_in_worker(worker: int) -> None:
    get_worker_info().dataset.epoch = worker


def test_setting_an_attribute_of_decoded_data_is_refused() -> None:
    message = r"^setting dataset\.epoch does not change decoded samples; .* use the DataLoader as it is$"
    replacement = from_dataloader(DataLoader(Pairs(), 7))
    with pytest.raises(ConfigError, match=message):
        replacement.dataset.epoch = 3
    for dataset in (Pairs(), Transformed(Stateful(is_random=True))):
        with pytest.raises(ConfigError, match=message):
            from_dataloader(DataLoader(dataset, 7, num_workers=1, worker_init_fn=set_in_worker), "ram")


FLIP = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Counting:
    """Keeps state from sample to sample, in a list that is not searched for counters."""

    def __init__(self) -> None:
        self.seen = list[Any]()

    def __call__(self, image: Any) -> Any:
        self.seen.append(image)
        return v1.functional.rotate(image, len(self.seen))


class Unpacking(Pictures):
    def __getitem__(self, index: int) -> Any:
        red, green, blue = self.transform(self.open(index))
        return red, green, blue


class CountingReads(Pairs):
    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return super().__getitem__(index)


class ChangingData(Pairs):
    data = torch.zeros(SIZE, 2, 2)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.data[index].sub_(1.0), index


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "first part": (lambda folder: Pictures(folder, v1.Compose([Counting(), FLIP])), "keep no state between samples"),
    "random part": (lambda folder: Pictures(folder, v1.Compose([FLIP, Counting()])), "keep no state between samples"),
    "inner": (lambda folder: Pictures(folder, v1.Compose([v1.RandomCrop(99), FLIP])), "0: RandomCrop raised Val"),
    "unpacked": (lambda folder: Unpacking(folder, FLIP), r"uses its transform, or the result of it \(TypeError"),
    "counter": (lambda folder: CountingReads(), r"0 is random \(it draws from CountingReads\.reads\) apart"),
    "in place": (lambda folder: ChangingData(), "if data were changed in place, build its dataset again"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_samples_that_cannot_be_split_are_refused(build: Callable[[Path], Any], message: str, folder: Path) -> None:
    dataloader = DataLoader(build(folder), 4, collate_fn=list)
    with pytest.raises((ConfigError, DataError), match=f"^ram: .*{message}"):
        from_dataloader(dataloader, "ram")
    with pytest.warns(UserWarning, match="^from_dataloader returns the DataLoader as it is, undecoded: ram: "):
        assert from_dataloader(dataloader) is dataloader


@pytest.mark.parametrize(("damaged", "workers"), [(0, 0), (7, 2)])
def test_a_picture_that_cannot_be_read_is_named(damaged: int, workers: int, tmp_path: Path) -> None:
    dataset = Pictures(write_pictures(tmp_path), FLIP)
    path = dataset.paths[damaged]
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-60]), path.unlink):
        damage()
        with pytest.raises(DataError, match=rf"^ram: sample {damaged}: (open|load) raised \w+Error: "):
            from_dataloader(DataLoader(dataset, 4, num_workers=workers), "ram")
    assert list(from_dataloader(DataLoader(Subset(dataset, [1, 2, 3]), 3), "ram"))


def test_attributes_of_transforms_that_are_still_applied_may_change(folder: Path) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Pictures(folder, deepcopy(FLIP)), 9)

    for form in ("exact", "tensor"):
        original, replaced = build(), from_dataloader(build(), "ram", transforms=form)
        for loader in (original, replaced):
            assert list(loader)
            loader.dataset.transform.transforms[1].p = 1.0
        assert_same(collect(replaced), collect(original))
