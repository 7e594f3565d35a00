"""The data set that an audit loads, the loaders over it, and the epochs that they deliver."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from vitmnist.data.seeding import GENERATORS, draw_from_generators, seed_generators
from vitmnist.errors import ConfigError, DataError

SEED = 0
WORKERS = 2
ENDLESS = 10  # an epoch of so many times the set counts as endless

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


@dataclass(frozen=True)
class Epoch:
    """The samples of epoch `number` from batch `first_batch` on.

    `batches`: the indices of each; `noise` `[N, 3]`, or None if the batches do not have it.
    """

    number: int
    batches: list[list[int]]
    noise: np.ndarray[Any, Any] | None
    first_batch: int = 0

    @property
    def indices(self) -> list[int]:
        """All indices, `[N]`."""
        return [index for batch in self.batches for index in batch]

    @cached_property
    def places(self) -> list[str]:
        """Where each sample is: `epoch 0, batch 3`."""
        return [
            f"epoch {self.number}, batch {number}"
            for number, batch in enumerate(self.batches, self.first_batch)
            for _ in batch
        ]

    def tail(self, start: int) -> Epoch:
        """The same from batch `start` on."""
        skipped = sum(map(len, self.batches[:start]))
        return Epoch(self.number, self.batches[start:], None if self.noise is None else self.noise[skipped:], start)


def start_epoch(loader: Any, number: int) -> Iterator[Any]:
    """The batches of the next epoch of a loader, which is epoch `number`."""
    if callable(epoch := getattr(loader, "epoch", None)):
        return iter(epoch(number))
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)
    return iter(loader)


def read_epoch(batches: Iterator[Any], number: int, samples: int, first_batch: int = 0) -> Epoch:
    """Read the batches of epoch `number` from batch `first_batch` on, to their end.

    Raises:
        DataError: no batch, no end, or batches without the indices.
    """
    parts: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]] = []
    total = 0
    for batch in batches:
        parts.append(_read_batch(batch))
        total += len(parts[-1][0])
        if total > ENDLESS * samples:
            raise DataError(f"epoch {number} did not end after {total} samples of a set of {samples}")
    if not parts and not first_batch:
        reason = "the loader can only be iterated once" if number else f"audit more than {samples} samples"
        raise DataError(f"epoch {number} has no batch; {reason}")
    noise = [part for _, part in parts if part is not None]
    has_noise = noise and len(noise) == len(parts)
    indices = [part.tolist() for part, _ in parts]
    return Epoch(number, indices, np.concatenate(noise) if has_noise else None, first_batch)


def _read_batch(batch: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Copies of the indices `[B]` and of the noise `[B, 3]`: a loader may reuse the memory of a batch."""
    leaves = [np.array(leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf) for leaf in tree_leaves(batch)]
    if leaves and leaves[0].ndim == 0:  # a list of samples, or a single one
        leaves = [np.stack(column) for column in (leaves[::2], leaves[1::2]) if column]
    if not leaves or leaves[0].ndim != 1 or not np.issubdtype(leaves[0].dtype, np.integer):
        found = f"{leaves[0].dtype} {list(leaves[0].shape)}" if leaves else "missing"
        raise DataError(
            f"the first value of a batch must be the indices of its samples, whole numbers [B], but is {found}; "
            "let the loader deliver the samples (index, noise) of the data set as they are"
        )
    has_noise = len(leaves) > 1 and leaves[1].shape == (len(leaves[0]), len(GENERATORS))
    return leaves[0], leaves[1] if has_noise else None


def index_difference(expected: Epoch, found: Epoch) -> str:
    """The first divergence in the indices or the ends of batches; empty if there is none."""
    no_batch: list[int] = []
    batches = zip_longest(expected.batches, found.batches, fillvalue=no_batch)
    for batch, (wanted, got) in enumerate(batches, found.first_batch):
        for one, other in zip_longest(wanted, got):
            if one != other:
                named = ["the end" if index is None else f"index {index}" for index in (one, other)]
                return f"epoch {found.number}, batch {batch}: expected {named[0]}, found {named[1]}"
    return ""


def noise_difference(expected: Epoch, found: Epoch) -> str:
    """The first divergence in the noise of the same indices; empty if there is none, or it cannot be compared."""
    if expected.noise is None or found.noise is None or expected.indices != found.indices:
        return ""
    differs = expected.noise != found.noise
    if not differs.any():
        return ""
    position = int(differs.any(axis=1).argmax())
    names = ", ".join(name for name, column in zip(GENERATORS, differs.T, strict=True) if column.any())
    return f"{found.places[position]}: the random numbers of index {found.indices[position]} differ ({names})"
