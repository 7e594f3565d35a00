"""An epoch as a loader delivered it, and the comparison of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch

from vitmnist.data.seeding import GENERATORS
from vitmnist.errors import DataError

ENDLESS = 10  # an epoch of so many times the set counts as endless


@dataclass(frozen=True)
class Epoch:
    """The samples of epoch `number` from batch `first_batch` on.

    `indices` `[N]`; `noise` `[N, 3]`, or None if the batches do not have it.
    """

    number: int
    indices: list[int]
    noise: np.ndarray[Any, Any] | None
    batch_sizes: list[int]
    first_batch: int = 0

    @property
    def batch_numbers(self) -> list[int]:
        """The batch of each sample, `[N]`."""
        return [batch for batch, size in enumerate(self.batch_sizes, self.first_batch) for _ in range(size)]

    def place(self, position: int) -> str:
        """Where sample `position` is: `epoch 0, batch 3`."""
        return f"epoch {self.number}, batch {self.batch_numbers[position]}"

    def tail(self, start: int) -> Epoch:
        """The same from batch `start` on."""
        skipped = sum(self.batch_sizes[:start])
        noise = None if self.noise is None else self.noise[skipped:]
        return Epoch(self.number, self.indices[skipped:], noise, self.batch_sizes[start:], start)


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
    return Epoch(
        number,
        list(chain.from_iterable(indices.tolist() for indices, _ in parts)),
        np.concatenate(noise) if noise and len(noise) == len(parts) else None,
        [len(indices) for indices, _ in parts],
        first_batch,
    )


def index_difference(expected: Epoch, found: Epoch) -> str:
    """The first divergence in the indices or the sizes of batches; empty if there is none."""
    pairs = zip_longest(expected.indices, found.indices)
    for position, (wanted, got) in enumerate(pairs):
        if wanted != got:
            place = (expected if got is None else found).place(position)
            if got is None:
                return f"{place}: expected index {wanted}, found the end"
            return f"{place}: expected {'the end' if wanted is None else f'index {wanted}'}, found index {got}"
    for batch, (wanted, got) in enumerate(zip(expected.batch_sizes, found.batch_sizes, strict=False)):
        if wanted != got:
            return f"epoch {found.number}, batch {found.first_batch + batch}: expected {wanted} samples, found {got}"
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
    return f"{found.place(position)}: the random numbers of index {found.indices[position]} differ ({names})"


def _read_batch(batch: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Copies of the indices `[B]` and of the noise `[B, 3]`: a loader may reuse the memory of a batch."""
    leaves = list(_leaves(batch))
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


def _leaves(batch: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _leaves(part)
    else:
        yield np.array(batch.cpu().numpy() if isinstance(batch, torch.Tensor) else batch)
