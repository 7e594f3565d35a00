"""Checks that a registered loader keeps the contract: `check_loader("mine")` in a test of yours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vitmnist.auditing.promises import PROMISES
from vitmnist.auditing.subject import Broken, ProbeDataset, Subject, Unchecked, copy_probe
from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import ORDERS, EpochSampler
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import SampleSource
from vitmnist.loaders.base import Loader
from vitmnist.loaders.make_loader import Data, loadable, make_loader

BATCH_SIZE = 5
SIZE = 23
SEED = 7


def check_loader(name: str, data: Data | None = None, *, device: str = "cpu", **options: Any) -> None:
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
    loaded = loadable(data, SEED)
    if len(loaded) < SIZE:
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


def _subjects(name: str, given: SampleSource, device: str, options: dict[str, Any]) -> Iterator[Subject]:
    """The loader over the given data, and if that is a map-style dataset, over random samples.

    Equality with the definition implies that each index comes once, and that orders differ.
    """
    preprocess = Preprocess(given) if isinstance(given, Split) else torch.nn.Identity()

    def build(data: Any, size: int, **settings: Any) -> Loader:
        order = {"batch_size": BATCH_SIZE, "seed": SEED, "device": device, **settings}
        return make_loader(name, loadable(data, SEED).part(slice(size)), **order, **options)

    def copy(batch: Any) -> tuple[Tensor, Tensor]:
        """Labels, and images as a model would see them: those of a split are normalised."""
        if found := {part.device.type for part in batch} - {torch.device(device).type}:
            raise Broken(f"batches are on {', '.join(found)}, not on {device}")
        images, labels = batch
        return labels.cpu().clone(), preprocess(images.cpu()).clone()

    def define(data: Any, number: int, *, size: int, shuffle: str, drop_last: bool, epochs: int | None) -> list[Any]:
        """The batches of an epoch, straight from the definition."""
        source = loadable(data, SEED)
        sampler = EpochSampler(size, BATCH_SIZE, SEED, shuffle, drop_last)
        batches = []
        for indices in sampler.batches(number):
            samples = [source.read(slice(row, row + 1), number) for row in torch.arange(size)[indices].tolist()]
            batches.append([torch.cat(parts).to(device) for parts in zip(*samples, strict=True)])
        return list(map(copy_probe if isinstance(data, ProbeDataset) else copy, batches))

    size = len(given)
    # A map-style dataset has no shape before its first sample.
    sizes = [*([0] if given.is_decoded else []), 1, BATCH_SIZE, BATCH_SIZE + 1]
    variants: list[dict[str, Any]] = [
        *({"shuffle": order} for order in ORDERS),
        {"shuffle": "batch", "drop_last": True},
        *({"size": some, "drop_last": drop_last} for some in sizes for drop_last in (False, True)),
    ]
    settings = {"size": size, "shuffle": "sample", "drop_last": False, "epochs": None}
    yield Subject(build, given, settings, {str(one): one for one in variants}, define, copy)
    if not given.is_decoded:
        probe = Subject(build, ProbeDataset(size), settings, {"the usual order": {}}, define)
        yield probe.with_accepted_samples()
