"""Which images make up batch k of epoch e: the only source of indices for every loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitmnist.errors import ConfigError, allowed_names

ORDERS = ("sample", "batch", "none")
"""The values of `shuffle`."""


@dataclass(frozen=True)
class EpochSampler:
    """The batches of an epoch as a pure function of (seed, epoch), drawn on the CPU for every device.

    `shuffle`:
        sample: a full permutation of the set.
        batch: contiguous blocks in random order, as in the article; each is a view of the set. The blocks are the
            same in every epoch, and a short block stays last.
        none: the set in its own order, for evaluation.

    Args:
        size: images in the set.
        drop_last: leave out a last batch shorter than `batch_size`.

    Raises:
        ConfigError: `batch_size` is not a whole number from 1, `seed` not one from 0, or another value is unknown.
    """

    size: int
    batch_size: int
    seed: int
    shuffle: str = "sample"
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.shuffle not in ORDERS:
            raise ConfigError(f"shuffle={self.shuffle}: {allowed_names(str(self.shuffle), ORDERS)}")
        if not isinstance(self.drop_last, bool):
            raise ConfigError(f"drop_last={self.drop_last}: must be True or False")
        for name, least in (("batch_size", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self.size, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def global_sampler(self) -> EpochSampler:
        """The batches of all ranks together; in a single process, this sampler."""
        return self

    def num_valid(self, batch: int) -> int:
        """How many images of batch `batch` count."""
        return min(self.batch_size, self.size - batch * self.batch_size)

    def batches(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[slice | Tensor]:
        """The indices of each batch from batch `start` on: a slice where they are contiguous, else int64 `[B]`.

        A permutation is moved to `device` once, and its batches are views of it there.

        Raises:
            ValueError: `start` is neither a batch of the epoch nor its end.
        """
        if self.shuffle == "sample":
            indices = self.indices(epoch, start, device)
            if len(indices):  # split would make one empty batch of an empty tensor
                yield from indices.split(self.batch_size)
        else:
            yield from self._spans(epoch, start)

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """The concatenated indices of all batches from batch `start` on: int64 on `device`; raises as `batches`.

        Every batch but the last has `batch_size` of them, since a short block stays last.
        """
        if self.shuffle == "sample":
            self._check(start)
            stop = len(self) * self.batch_size  # beyond the end, unless the short batch is dropped
            # A copy, because the next caller gets the same permutation.
            return _permutation(self.size, self.seed, epoch)[start * self.batch_size : stop].to(device, copy=True)
        return torch.cat([as_tensor(slice(0, 0)), *map(as_tensor, self._spans(epoch, start))]).to(device)

    def _spans(self, epoch: int, start: int) -> Iterator[slice]:
        """The contiguous batches where the order is not a permutation of the samples."""
        self._check(start)
        blocks = list(range(len(self)))
        if self.shuffle == "batch":
            full = self.size // self.batch_size
            blocks[:full] = torch.randperm(full, generator=_generator(self.seed, epoch), device="cpu").tolist()
        for block in blocks[start:]:
            yield slice(block * self.batch_size, min((block + 1) * self.batch_size, self.size))

    def _check(self, start: int) -> None:
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: an epoch has {len(self)} batches")


def as_tensor(batch: slice | Tensor) -> Tensor:
    """The indices of a batch as int64 `[B]`."""
    return torch.arange(batch.start, batch.stop, device="cpu") if isinstance(batch, slice) else batch


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int, also one of NumPy; raises `ConfigError` if it is below `least`, or no whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name}={value!r}: must be a whole number")
    if value < least:
        raise ConfigError(f"{name}={value}: must be at least {least}")
    return index(value)


@lru_cache(maxsize=1)  # the loader and the augmentation draw the same one: 1.4 ms each for 60,000 images
def _permutation(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=_generator(seed, epoch), device="cpu")


def _generator(seed: int, epoch: int) -> torch.Generator:
    # torch's CPU generator keeps 32 bits of a seed: with seed + epoch, or the two concatenated, runs would share
    # epochs. SeedSequence mixes them well, and NumPy guarantees a stable output.
    (mixed,) = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(1)
    return torch.Generator().manual_seed(int(mixed))


def split_evenly(count: int, rank: int, ranks: int) -> range:
    """The rows of a batch of `count` images that belong to a rank; the first ranks get one more if it is uneven."""
    each, extra = divmod(count, ranks)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


@dataclass(frozen=True, kw_only=True)
class RankSampler(EpochSampler):
    """A rank's part of each batch of `parent`; all ranks together see the batches of a single process.

    `batch_size` is the rank's part of a full batch. A last batch may have fewer images than there are ranks. A rank
    without any gets one that does not count (`num_valid` is 0), so that all ranks take the same number of steps.

    Raises:
        ConfigError: a full batch has fewer images than there are ranks.
    """

    parent: EpochSampler
    rank: int
    ranks: int

    @property
    def global_sampler(self) -> EpochSampler:
        return self.parent

    def __len__(self) -> int:
        return len(self.parent)

    def num_valid(self, batch: int) -> int:
        return len(split_evenly(self.parent.num_valid(batch), self.rank, self.ranks))

    @classmethod
    def of(cls, global_sampler: EpochSampler, rank: int, ranks: int) -> EpochSampler:
        """The part of `global_sampler` that belongs to a rank; all of it, if there is only one."""
        if ranks == 1:
            return global_sampler
        if ranks > global_sampler.batch_size:
            raise ConfigError(
                f"batch_size={global_sampler.batch_size}: {ranks} processes train together, and each must have an "
                f"image of every batch; type batch_size={ranks} or more, or start fewer"
            )
        batch_size = len(split_evenly(global_sampler.batch_size, rank, ranks))
        return cls(
            global_sampler.size, batch_size, global_sampler.seed, global_sampler.shuffle, global_sampler.drop_last,
            parent=global_sampler, rank=rank, ranks=ranks,
        )  # fmt: skip

    def batches(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[slice | Tensor]:
        for batch in self.parent.batches(epoch, start, device):
            if isinstance(batch, slice):
                rows = self._rows(batch.stop - batch.start)
                yield slice(batch.start + rows.start, batch.start + rows.stop)
            else:
                yield batch[self._rows(len(batch))]

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        return torch.cat([as_tensor(slice(0, 0)), *map(as_tensor, self.batches(epoch, start))]).to(device)

    def _rows(self, size: int) -> slice:
        """The rows of a batch of `size` images that are delivered: at least one."""
        rows = split_evenly(size, self.rank, self.ranks) or range(1)
        return slice(rows.start, rows.stop)
