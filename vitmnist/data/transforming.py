"""Replaces a `DataLoader` whose samples are random: what is not random of them is kept, the rest is done as before."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vitmnist.data.batch_tensors import find_difference
from vitmnist.data.dataloaders import read_batch, rebuilt
from vitmnist.data.decoded_dataset import Store, TransformedDataset
from vitmnist.data.decoding import find_random
from vitmnist.data.frozen_state import FrozenState, preserved_own_generators
from vitmnist.data.keep_samples import keep_samples
from vitmnist.data.samples import Samples, encode, naming
from vitmnist.data.seeding import seed_generators
from vitmnist.data.tensor_transforms import (
    CollateFinished,
    DeviceDataLoader,
    finish_of,
    picture_difference,
    without_closing,
)
from vitmnist.data.transforms import DividedDataset, Halves
from vitmnist.errors import ConfigError, DataError, described

TRIED = 8  # samples on which transforms are tried, and by which the memory is estimated
COMPARED = 3  # batches that are compared with the original before the replacement is returned
BATCH = 16  # samples in such a batch at most: each is decoded again


@dataclass(frozen=True)
class GivenHalves(Dataset[Any]):
    """A dataset whose two steps the user has named, as `DividedDataset`."""

    decode: Callable[[int], Any]
    transform: Callable[[Any], Any]
    size: int
    halves: tuple[Halves, ...] = ()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        with naming(index):
            return self.decode(index)


@dataclass(frozen=True)
class Form:
    """How random transforms are applied; see `from_dataloader`."""

    transforms: Literal["exact", "tensor"] = "exact"
    max_side: int | None = None
    tolerance: float = 8.0
    device: torch.device | None = None


@dataclass(frozen=True)
class Shrink:
    """Makes the longer side of a picture at most `max_side` pixels long."""

    max_side: int

    def __call__(self, image: Any, *others: Any) -> Any:
        if others or not isinstance(image, Image.Image):
            found = f"{1 + len(others)} inputs" if others else f"a {type(image).__name__}"
            raise ConfigError(f"max_side={self.max_side}: is for a PIL image, and the random transforms get {found}")
        shrunk = image.copy()
        shrunk.thumbnail((self.max_side, self.max_side), Image.Resampling.BILINEAR)
        return shrunk


def transformed(dataloader: DataLoader[Any], store: Store, form: Form, given: GivenHalves | None) -> Any:
    """The replacement of a `DataLoader`, with its own workers; raises as `from_dataloader`.

    Args:
        given: the two steps of the dataset, if the user has named them.
    """
    dataset: Any = dataloader.dataset
    size = len(dataset)
    probes = sorted({probe * size // TRIED for probe in range(TRIED)})
    source: Any = given or DividedDataset(dataset, probes)
    if random := find_random(source, encode):
        raise ConfigError(
            f"{store.name}: {random} is random before its random transforms, or one of these keeps a state from sample "
            "to sample; transforms are looked for in the attributes transform and transforms of the dataset, not of "
            "its class. Move all that is random there, name the two steps with decode= and transform=, or use the "
            "DataLoader as it is"
        )
    for half in source.halves if form.max_side else ():
        half.once.append(Shrink(form.max_side or 0))
    state = FrozenState(dataset, dataloader.collate_fn, live=[one for half in source.halves for one in half.always])
    once = re.sub(" at 0x[0-9a-f]+", "", str([half.once for half in source.halves]))  # not the same in each process
    fingerprint = store.fingerprint and f"{store.fingerprint}, {once}"
    folder = store.folder if store.name == "cache" else None
    samples = keep_samples(source, probes, dataloader, folder, fingerprint)
    state.ignore_changes()
    exact = TransformedDataset(dataset, state, samples, source.transform)
    if form.max_side:
        warnings.warn(f"max_side={form.max_side}: larger pictures are kept smaller, so batches differ", stacklevel=4)
        _seeded_batch(dataloader, exact, probes)  # a picture may be too small now
    else:
        _check_batches(dataloader, exact, state, is_given=given is not None, is_named=fingerprint is not None)
    if given or (form.transforms == "exact" and not samples.are_bytes):  # of which ToTensor makes other numbers
        return rebuilt(dataloader, dataset=exact)
    return _with_batch_transforms(dataloader, exact, samples, source, probes, form)


def _with_batch_transforms(
    dataloader: DataLoader[Any], exact: TransformedDataset, samples: Samples, source: Any, probes: list[int], form: Form
) -> Any:
    """The replacement whose last transforms are applied to whole batches, where that makes the same of them."""
    of_tensors = form.transforms == "tensor"
    halves, pictorial, closing = without_closing(source.halves, of_tensors)
    if of_tensors:
        _check_tensors(source, halves, pictorial, samples, probes, form.tolerance)
        samples = samples.with_tensors()
    elif not closing:
        return rebuilt(dataloader, dataset=exact)
    closed = [Halves(always=[*half.always, *closing]) for half in halves]
    unfinished, finished = (partial(source.transform, halves=some) for some in (halves, closed))
    datasets = exact.like(samples, unfinished), exact.like(samples, finished), exact
    try:
        batch, expected, original = (_seeded_batch(dataloader, one, probes[:2]) for one in datasets)
        finish = finish_of(closing, batch, expected, original, of_tensors)
    except Exception as error:  # the collate function gets bytes, and may need floats
        if of_tensors:
            raise ConfigError(f"transforms='tensor': no batch: {described(error)}; use transforms='exact'") from error
        return rebuilt(dataloader, dataset=exact)
    dataset = exact.like(samples, finished, unfinished)
    collate = CollateFinished(dataloader.collate_fn, finish, dataset)
    if form.device is None or not of_tensors:
        return rebuilt(dataloader, dataset=dataset, collate_fn=collate)
    pin_memory = form.device.type == "cuda"
    replaced = rebuilt(dataloader, DeviceDataLoader, dataset=dataset, collate_fn=collate, pin_memory=pin_memory)
    replaced.device = form.device
    return replaced


def _check_tensors(
    source: Any, halves: list[Halves], pictorial: list[int], samples: Samples, probes: list[int], tolerance: float
) -> None:
    """Warn, or raise `ConfigError`, if the transforms make other pixels of tensors."""
    mean, largest = picture_difference(source.halves, halves, pictorial, samples, probes)
    if largest > tolerance:
        raise ConfigError(
            f"transforms='tensor': pixels differ by up to {largest:.3g} of 255 from those of PIL images, and "
            f"tolerance={tolerance:g}; give a larger tolerance=, or use transforms='exact'"
        )
    if largest:
        warnings.warn(
            f"transforms='tensor': the same random transforms, with pixels that differ by {mean:.2g} of 255 on "
            f"average, at most by {largest:.3g}",
            stacklevel=6,
        )


def _check_batches(
    dataloader: DataLoader[Any], dataset: TransformedDataset, state: FrozenState, *, is_given: bool, is_named: bool
) -> None:
    """Raise `DataError` if a batch is not that of the original."""
    shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    parts = [part.tolist() for part in shuffled.split(min(dataloader.batch_size or BATCH, BATCH))[:COMPARED]]
    expected = [_seeded_batch(dataloader, dataloader.dataset, indices) for indices in parts]
    state.ignore_changes()
    for indices, batch in zip(parts, expected, strict=True):
        if difference := find_difference(_seeded_batch(dataloader, dataset, indices), batch):
            causes = ["a transform keeps a state from one sample to the next"]
            causes += ["decode= and transform= make other samples"] * is_given
            causes += ["fingerprint= names contents that have changed"] * is_named
            raise DataError(
                f"{difference} of samples {', '.join(map(str, indices[:3]))}, … is not what the DataLoader makes of "
                f"them: {' or '.join(reversed(causes))}"
            )


def _seeded_batch(dataloader: DataLoader[Any], dataset: Any, indices: Sequence[int]) -> Any:
    """The batch of these samples of a dataset, with the same random numbers in each call."""
    with preserved_own_generators((dataset, dataloader.collate_fn)):
        seed_generators(0, 0, 0)
        return read_batch(dataset, dataloader.collate_fn, indices)
