"""The part of each batch that is one process's ("rank"), where several train together.

A loader knows nothing of it: it delivers the batches of an order, and each rank's loader is given an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmnist.config.schema import Shuffle
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError


def share(count: int, rank: int, ranks: int) -> slice:
    """The part of `count` images that is a rank's; the first ranks have one more where it does not come out even."""
    each, more = divmod(count, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


@dataclass(frozen=True, kw_only=True)
class RankSampler(EpochSampler):
    """A rank's part of each batch of `together`: all ranks see together the batches that one process would see.

    `batch_size` is its part of a full batch. A last batch may have fewer images than there are ranks. A rank that has
    none of it is given one that does not count, so that all ranks take as many steps: `count` is 0 there.

    Raises:
        ConfigError: a full batch has fewer images than there are ranks.
    """

    global_sampler: EpochSampler
    rank: int
    ranks: int

    def __len__(self) -> int:
        return len(self.global_sampler)

    def num_valid(self, batch: int) -> int:
        return _length(share(self.global_sampler.num_valid(batch), self.rank, self.ranks))

    @classmethod
    def of(cls, global_sampler: EpochSampler, rank: int, ranks: int) -> RankSampler:
        """The part of `together` that is a rank's."""
        if ranks > global_sampler.batch_size:
            raise ConfigError(
                f"batch_size={global_sampler.batch_size}: {ranks} processes train together, and each must have an "
                f"image of every batch; type batch_size={ranks} or more, or start fewer"
            )
        own = _length(share(global_sampler.batch_size, rank, ranks))
        return cls(
            global_sampler.size, own, global_sampler.seed, global_sampler.shuffle, global_sampler.drop_last,
            global_sampler=global_sampler, rank=rank, ranks=ranks,
        )  # fmt: skip

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        if self.shuffle != Shuffle.sample:
            return super().indices(epoch, start, device)
        drawn = self.global_sampler.indices(epoch, start)
        size = self.global_sampler.batch_size
        whole = len(drawn) - len(drawn) % size
        last = drawn[whole:]
        own = drawn[:whole].view(-1, size)[:, self._part(size)].flatten()
        return torch.cat([own, last[self._part(len(last))]]).to(device)

    def _part(self, size: int) -> slice:
        """The rows of a batch that are delivered."""
        part = share(size, self.rank, self.ranks)
        return part if _length(part) else slice(0, 1)

    def _spans(self, epoch: int, start: int) -> Iterator[slice]:
        for span in self.global_sampler._spans(epoch, start):
            part = self._part(span.stop - span.start)
            yield slice(span.start + part.start, span.start + part.stop)
