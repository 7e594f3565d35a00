"""One rank's part of each batch, where several processes train together.

A loader does not know about ranks: it delivers the batches of a sampler, and each rank's loader has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler, as_tensor
from vitmnist.errors import ConfigError


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
