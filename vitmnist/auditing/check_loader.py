"""Checks that a registered loader keeps the contract: `check_loader("mine")` in a test of yours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from vitmnist.auditing.promises import PROMISES
from vitmnist.auditing.subject import Broken, ProbeDataset, Subject, Unchecked, copy_probe
from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.collate import collate_samples
from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import ORDERS, EpochSampler
from vitmnist.data.seeding import preserved_generators, read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.loaders.base import Data, Loader
from vitmnist.loaders.make_loader import loadable, make_loader

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


def _subjects(name: str, given: Data, device: str, options: dict[str, Any]) -> Iterator[Subject]:
    """The loader over the given data, and if that is a map-style dataset, over random samples.

    Equality with the definition implies that each index comes once, and that orders differ.
    """
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
        samples = TensorDataset(data.images, data.labels) if isinstance(data, TensorSet) else data
        sampler = EpochSampler(size, BATCH_SIZE, SEED, shuffle, drop_last)
        rows = [torch.arange(size)[indices].tolist() for indices in sampler.batches(number)]
        batches = [collate_samples(read_samples(samples, chosen, SEED, number)) for chosen in rows]
        chosen_copy = copy_probe if isinstance(data, ProbeDataset) else copy
        return [chosen_copy([part.to(device) for part in batch]) for batch in batches]

    is_tensors, size = isinstance(given, TensorSet), len(given)  # type: ignore[arg-type]
    # A map-style dataset has no shape before its first sample.
    sizes = [*([0] if is_tensors else []), 1, BATCH_SIZE, BATCH_SIZE + 1]
    variants: list[dict[str, Any]] = [
        *({"shuffle": order} for order in ORDERS),
        {"shuffle": "batch", "drop_last": True},
        *({"size": some, "drop_last": drop_last} for some in sizes for drop_last in (False, True)),
    ]
    settings = {"size": size, "shuffle": "sample", "drop_last": False, "epochs": None}
    yield Subject(build, given, settings, {str(one): one for one in variants}, define, copy)
    if not is_tensors:
        probe = Subject(build, ProbeDataset(size), settings, {"the usual order": {}}, define)
        yield probe.with_accepted_samples()


def _first(data: Any, size: int) -> Any:
    """The first `size` samples."""
    if size == len(data):
        return data
    if isinstance(data, Split):
        return data.part(slice(size))
    if isinstance(data, TensorSet):
        return TensorSet(data.images[:size], data.labels[:size])
    return Subset(data, range(size))
