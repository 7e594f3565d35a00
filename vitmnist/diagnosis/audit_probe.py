"""The data set that an audit loads, and the loaders over it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from vitmnist.data.seeding import GENERATORS, draw_from_generators, seed_generators
from vitmnist.diagnosis.audit_epoch import Epoch, read_epoch, start_epoch
from vitmnist.errors import ConfigError

SEED = 0
WORKERS = 2

LoaderFactory = Callable[..., Any]


class ProbeDataset(Dataset[tuple[int, Any]]):
    """Sample i is i, and a number from each of the global generators, `[3]` (or constants, for a comparison)."""

    def __init__(self, size: int, is_random: bool) -> None:
        self.size, self.is_random = size, is_random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: SupportsIndex) -> tuple[int, Any]:
        number = index.__index__()
        if not 0 <= number < self.size:
            raise IndexError(f"sample {number} of a data set of {self.size}")
        return number, draw_from_generators() if self.is_random else np.full(len(GENERATORS), float(number))


@dataclass(frozen=True)
class Case:
    """The loaders of a factory over a `ProbeDataset`.

    `refusal`: why the loader takes only constant samples; empty if it takes random ones.
    """

    factory: LoaderFactory
    samples: int
    refusal: str = ""

    @cached_property
    def declared(self) -> frozenset[str]:
        """The names of the factory's parameters, without that of the data set."""
        return frozenset(list(inspect.signature(self.factory).parameters)[1:])

    @cached_property
    def dataset(self) -> ProbeDataset:
        return ProbeDataset(self.samples, is_random=not self.refusal)

    def settings(self, **wanted: int) -> dict[str, int]:
        """Keyword arguments for the factory: `wanted` over the defaults, restricted to what it declares."""
        values = {"num_workers": WORKERS, "rank": 0, "world_size": 1, "seed": SEED, **wanted}
        return {name: value for name, value in values.items() if name in self.declared}

    def check_signature(self) -> None:
        """Raise `ConfigError` unless the factory can be called."""
        if not callable(self.factory):
            raise ConfigError(
                f"loader_factory: must be a function that builds a loader, found {type(self.factory).__name__}; "
                "write lambda dataset: DataLoader(dataset, …)"
            )
        try:
            inspect.signature(self.factory).bind(self.dataset, **self.settings())
        except TypeError as error:
            call = ", ".join(["dataset", *(f"{name}={value}" for name, value in self.settings().items())])
            raise ConfigError(
                f"loader_factory: cannot be called as loader_factory({call}): {error}; of num_workers, rank, "
                "world_size and seed declare those that it takes, and give other parameters a default"
            ) from error

    def seed_generators(self) -> None:
        """Give the global generators the state in which every loader is built, as a training script may."""
        seed_generators(SEED, 0, 0)

    @contextmanager
    def open(self, **wanted: int) -> Iterator[Any]:
        """A new loader, closed at the end."""
        self.seed_generators()
        loader = self.factory(self.dataset, **self.settings(**wanted))
        try:
            yield loader
        finally:
            if callable(close := getattr(loader, "close", None)):
                close()

    def read_epochs(self, count: int = 2, **wanted: int) -> list[Epoch]:
        """The first epochs of a new loader."""
        with self.open(**wanted) as loader:
            return [read_epoch(start_epoch(loader, number), number, self.samples) for number in range(count)]

    @cached_property
    def epochs(self) -> list[Epoch]:
        """Epochs 0 and 1 with the default settings."""
        return self.read_epochs()
