"""A loader under examination, the dataset that identifies its samples, and the batches that it delivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from vitmnist.data.seeding import GENERATORS, draw_from_generators, seed_generators
from vitmnist.errors import ConfigError, DataError
from vitmnist.store.difference import find_difference

START = (0, 0, 0)  # seeds the global generators before a loader is built, as a training script may
ENDLESS = 10  # an epoch of this many times the set counts as endless

BatchCopy = tuple[Tensor, Tensor | None]
"""Labels and images on the CPU; of a `ProbeDataset`, the indices `[B]` and the numbers `[B, 3]`, if any."""


class Broken(AssertionError):  # noqa: N818
    """A promise is broken; the message is the evidence."""


class Unchecked(Exception):  # noqa: N818
    """A promise cannot be checked; the message is the reason."""


class ProbeDataset(Dataset[tuple[int, Any]]):
    """Sample i is i and float64 `[3]`: a number from each of the global generators, or i itself if it is not random."""

    def __init__(self, size: int, is_random: bool = True) -> None:
        self.size, self.is_random = size, is_random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: SupportsIndex) -> tuple[int, Any]:
        number = index.__index__()
        if not 0 <= number < self.size:
            raise IndexError(f"sample {number} of a dataset of {self.size}")
        return number, draw_from_generators() if self.is_random else np.full(len(GENERATORS), float(number))


def copy_probe(batch: Any) -> BatchCopy:
    """Copies of the indices and numbers of a batch in any form: a loader may reuse its memory."""
    leaves = [np.array(leaf.cpu().numpy() if isinstance(leaf, Tensor) else leaf) for leaf in tree_leaves(batch)]
    if leaves and leaves[0].ndim == 0:  # a list of samples, or a single one
        leaves = [np.stack(column) for column in (leaves[::2], leaves[1::2]) if column]
    if not leaves or leaves[0].ndim != 1 or not np.issubdtype(leaves[0].dtype, np.integer):
        raise DataError("the first value of a batch must be the indices of its samples; deliver samples as they are")
    has_noise = len(leaves) > 1 and leaves[1].shape == (len(leaves[0]), len(GENERATORS))
    return torch.from_numpy(leaves[0]), torch.from_numpy(leaves[1]) if has_noise else None


@dataclass(frozen=True)
class Subject:
    """A loader under examination.

    Args:
        build: `build(data, **settings)` returns a new one.
        settings: the parameters of `build` that a promise may change, with their usual values.
        variants: settings whose batches must be those of `define(data, number, **settings)`, without it the usual ones.
        copy: makes a `BatchCopy` of a loader's batch.
    """

    build: Callable[..., Any]
    data: Any
    settings: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    define: Callable[..., list[BatchCopy]] | None = None
    copy: Callable[[Any], BatchCopy] = copy_probe

    def with_accepted_samples(self) -> Subject:
        """The subject over constant samples if the loader refuses random ones."""
        try:
            _ = self.epochs
        except ConfigError:
            return replace(self, data=ProbeDataset(len(self.data), is_random=False))
        except Exception:  # each promise reports it
            return self
        return self

    def new(self, **wanted: Any) -> Any:
        """A new loader, with some other settings; those that `build` does not have are left out."""
        seed_generators(*START)
        known = {name: value for name, value in wanted.items() if name in self.settings}
        loader = self.build(self.data, **{**self.settings, **known})
        if not (hasattr(loader, "__iter__") or hasattr(loader, "epoch")):
            raise Broken(f"the function returned {type(loader).__name__}, which is no loader")
        return loader

    @contextmanager
    def open(self, **wanted: Any) -> Iterator[Any]:
        """A new loader, closed at the end."""
        loader = self.new(**wanted)
        try:
            yield loader
        finally:
            if callable(close := getattr(loader, "close", None)):
                close()

    def read(self, batches: Iterable[Any], number: int, start: int = 0) -> list[BatchCopy]:
        """Copies of the batches of epoch `number` from batch `start` on; raises `DataError` if empty or endless."""
        copies: list[BatchCopy] = []
        total, size = 0, len(self.data)
        for batch in batches:
            copies.append(self.copy(batch))
            total += len(copies[-1][0])
            if total > ENDLESS * size:
                raise DataError(f"epoch {number} did not end after {total} samples of a set of {size}")
        if not (copies or start or self.define):
            reason = "the loader can only be iterated once" if number else f"audit more than {size} samples"
            raise DataError(f"epoch {number} has no batch; {reason}")
        return copies

    def read_epochs(self, count: int = 2, **wanted: Any) -> list[list[BatchCopy]]:
        """The first epochs of a new loader."""
        with self.open(**wanted) as loader:
            epochs = [self.read(start_epoch(loader, number), number) for number in range(count)]
            if self.define and len(loader) != len(epochs[0]):
                raise Broken(f"its length is {len(loader)}, batches {len(epochs[0])}")
        return epochs

    @cached_property
    def epochs(self) -> list[list[BatchCopy]]:
        """Epochs 0 and 1 with the usual settings."""
        return self.read_epochs()

    def compare(self, found: list[BatchCopy], number: int, start: int = 0, context: str = "", **settings: Any) -> None:
        """Raise `Broken` if these are not the batches of epoch `number` from batch `start` on.

        Images are compared where they are defined, and between settings.
        """
        define = self.define
        expected = define(self.data, number, **{**self.settings, **settings}) if define else self.epochs[number]
        for batch, (theirs, ours) in enumerate(zip_longest(expected[start:], found), start):
            where = f"{context}epoch {number}, batch {batch}"
            if theirs is None or ours is None:
                raise Broken(f"{where} is {'missing' if theirs else 'one too many'}")
            if not _is_same(ours[0], theirs[0]):
                raise Broken(f"{where}: expected samples {_first(theirs[0])}, found {_first(ours[0])}")
            if (define or settings) and not _is_same(ours[1], theirs[1]):
                raise Broken(f"{where}: the samples {_first(theirs[0])} have other values")


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or other is None or not find_difference(one, other)


def _first(labels: Tensor) -> str:
    return ", ".join(map(str, labels[:3].tolist())) + ", …" * (len(labels) > 3)


def start_epoch(loader: Any, number: int) -> Iterator[Any]:
    """The batches of the next epoch of a loader, which is epoch `number`."""
    if callable(epoch := getattr(loader, "epoch", None)):
        return iter(epoch(number))
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)
    return iter(loader)
