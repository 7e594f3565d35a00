"""Checks that a registered loader keeps the contract: `check_loader("mine")` in a test of yours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from vitmnist.config.schema import Shuffle
from vitmnist.data.collate import collate_samples
from vitmnist.data.datasets.base import Split
from vitmnist.data.loaders import Data, Loader, loadable, make_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import preserved_generators, read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.diagnosis.audit_promises import PROMISES
from vitmnist.diagnosis.audit_subject import Broken, ProbeDataset, Subject, Unchecked, choose_samples
from vitmnist.errors import ConfigError

BATCH_SIZE = 5
SIZE = 23
SEED = 7


def check_loader(
    name: str, data: Data | tuple[Tensor, Tensor] | None = None, *, device: str = "cpu", **options: Any
) -> None:
    """Check every promise of the contract for the loader `name`.

    Args:
        name: as passed to `register`.
        data: what to load, at least 23 samples; a pair of random tensors if None.
        device: where the batches are delivered.
        options: the loader's own.

    Raises:
        AssertionError: a broken promise; the message begins with it.
    """
    if data is None:
        generator = torch.Generator().manual_seed(SEED)
        images = torch.randint(0, 256, (SIZE, 1, 4, 6), generator=generator, dtype=torch.uint8)
        data = images, torch.randint(0, 10, (SIZE,), generator=generator)
    loaded = loadable(data)
    if len(loaded) < SIZE:  # type: ignore[arg-type]
        raise ValueError(f"the check needs {SIZE} samples or more")
    with preserved_generators():
        for subject in _subjects(name, loaded, device, options):
            for promise in PROMISES:
                try:
                    promise(subject)
                except Unchecked:
                    continue
                except Exception as broken:  # a loader may fail in any way
                    kind = "" if isinstance(broken, Broken) else f"{type(broken).__name__}: "
                    raise AssertionError(f"{name}: {promise.__doc__}: {kind}{broken}") from broken


class Pairs(ProbeDataset):
    """A `ProbeDataset` of images and labels: the random numbers, and the index."""

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, int]:
        number, noise = super().__getitem__(index)
        return torch.from_numpy(noise), number


def _subjects(name: str, given: Data, device: str, options: dict[str, Any]) -> Iterator[Subject]:
    """The loader over the given data, and over samples whose labels are their indices."""
    preprocess = Preprocess(given) if isinstance(given, Split) else torch.nn.Identity()

    def build(data: Any, size: int, **settings: Any) -> Loader:
        order = {"batch_size": BATCH_SIZE, "seed": SEED, "device": device, **settings}
        return make_loader(name, _first(data, size), **order, **options)

    def copy(batch: Any) -> tuple[Tensor, Tensor]:
        """Labels, and images as a model would see them: those of a split are normalised."""
        if found := {part.device.type for part in batch} - {torch.device(device).type}:
            raise Broken(f"batches are on {', '.join(found)}, not on {device}")
        images, labels = batch
        return labels.cpu().clone(), preprocess(images.cpu()).clone()

    def define(data: Any, number: int, *, size: int, shuffle: str, drop_last: bool, epochs: int | None) -> list[Any]:
        """The batches of an epoch, straight from the definition."""
        data = TensorDataset(data.images, data.labels) if isinstance(data, TensorSet) else _first(data, size)
        sampler = EpochSampler(size, BATCH_SIZE, SEED, Shuffle(shuffle), drop_last)
        rows = [torch.arange(size)[indices].tolist() for indices in sampler.batches(number)]
        batches = [collate_samples(read_samples(data, chosen, SEED, number)) for chosen in rows]
        return [copy([part.to(device) for part in batch]) for batch in batches]

    size = len(given)  # type: ignore[arg-type]
    settings = {"size": size, "shuffle": "sample", "drop_last": False, "epochs": None}
    # A map-style data set has no shape before its first sample.
    sizes = (0, 1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1)[0 if isinstance(given, TensorSet) else 1 :]
    changed: list[dict[str, Any]] = [
        *({"shuffle": order.value} for order in Shuffle),
        *({"size": some} for some in sizes),
    ]
    variants = [{**change, "drop_last": drop_last} for change in changed for drop_last in (False, True)]
    subject = Subject(build, given, settings, {str(one): one for one in variants}, define, copy)
    yield replace(subject, has_indices=False)
    subject = replace(subject, variants={"the usual order": {}})
    if isinstance(given, TensorSet):
        yield replace(subject, data=TensorSet(given.images, torch.arange(size)), refusal="tensors are not random")
    else:
        yield choose_samples(replace(subject, data=ProbeDataset(size)), refusal=ConfigError)


def _first(data: Any, size: int) -> Any:
    """The first `size` samples."""
    if isinstance(data, ProbeDataset):
        return Pairs(size, data.is_random)
    if size == len(data):
        return data
    if isinstance(data, Split):
        return data.part(slice(size))
    if isinstance(data, TensorSet):
        return TensorSet(data.images[:size], data.labels[:size])
    return Subset(data, range(size))
