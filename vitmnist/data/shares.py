"""The part of an epoch that is one process's ("rank"), where several train together: of each batch, or of the set.

A loader knows nothing of it: it delivers the batches of an order, and each rank's loader is given an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from vitmnist.config import Shuffle
from vitmnist.data.order import EpochOrder
from vitmnist.errors import ConfigError


def share(count: int, rank: int, ranks: int) -> slice:
    """The part of `count` images that is a rank's; the first ranks have one more where it does not come out even."""
    each, more = divmod(count, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


@dataclass(frozen=True, kw_only=True)
class DividedOrder(EpochOrder):
    """A rank's part of what `together` is about; `batch_size` is its part of a whole batch.

    A last batch may have fewer images than there are ranks. Who has none of it is given one that does not count, so
    that all ranks take as many steps: `count` is 0 there.
    """

    together: EpochOrder
    rank: int
    ranks: int

    def __len__(self) -> int:
        return len(self.together)

    @property
    def whole(self) -> EpochOrder:
        return self.together

    def count(self, batch: int) -> int:
        return _length(share(self.together.count(batch), self.rank, self.ranks))


@dataclass(frozen=True, kw_only=True)
class RankOrder(DividedOrder):
    """A rank's part of each batch: all ranks see together the batches that one process would see.

    Raises:
        ConfigError: a whole batch has fewer images than there are ranks.
    """

    @classmethod
    def of(cls, together: EpochOrder, rank: int, ranks: int) -> RankOrder:
        """The part of `together` that is a rank's."""
        if ranks > together.batch_size:
            raise ConfigError(
                f"batch_size={together.batch_size}: {ranks} processes train together, and each must have an image of "
                f"every batch; type batch_size={ranks} or more, or start fewer"
            )
        own = _length(share(together.batch_size, rank, ranks))
        return cls(
            together.size, own, together.seed, together.shuffle, together.drop_last,
            together=together, rank=rank, ranks=ranks,
        )  # fmt: skip

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        if self.shuffle != Shuffle.sample:
            return super().indices(epoch, start, device)
        drawn = self.together.indices(epoch, start)
        size = self.together.batch_size
        whole = len(drawn) - len(drawn) % size
        last = drawn[whole:]
        own = drawn[:whole].view(-1, size)[:, self._part(size)].flatten()
        return torch.cat([own, last[self._part(len(last))]]).to(device)

    def _part(self, size: int) -> slice:
        """The rows of a batch that are delivered."""
        part = share(size, self.rank, self.ranks)
        return part if _length(part) else slice(0, 1)

    def _spans(self, epoch: int, start: int) -> Iterator[slice]:
        for span in self.together._spans(epoch, start):
            part = self._part(span.stop - span.start)
            yield slice(span.start + part.start, span.start + part.stop)


@dataclass(frozen=True, kw_only=True)
class ShardOrder(DividedOrder):
    """A rank's part of the set, its shard, in an order of its own: no image is ever another rank's.

    Each image is seen once an epoch, and a batch has as many images as in `together`; but which images meet in a batch
    depends on the number of ranks, and they always come from all shards alike.

    Args:
        first: where the shard begins in the set; it has `size` images.
    """

    first: int

    @classmethod
    def of(cls, together: EpochOrder, rank: int, ranks: int) -> ShardOrder:
        """The shard of the set that is a rank's."""
        if ranks > together.size:
            raise ConfigError(
                f"data.loader.placement=shard: the set has {together.size} images for {ranks} processes; "
                "type data.loader.placement=replicate"
            )
        even = RankOrder.of(together, rank, ranks)
        full, rest = divmod(together.size, together.batch_size)
        sizes = [
            full * _length(share(together.batch_size, other, ranks)) + _length(share(rest, other, ranks))
            for other in range(ranks)
        ]
        # Not the seed of all, or every shard would be drawn alike.
        (seed,) = np.random.SeedSequence(together.seed, spawn_key=(rank, ranks, 3)).generate_state(1)
        return cls(
            sizes[rank], even.batch_size, int(seed), together.shuffle, together.drop_last,
            together=together, rank=rank, ranks=ranks, first=sum(sizes[:rank]),
        )  # fmt: skip

    @property
    def within(self) -> EpochOrder:
        """The same order, its indices counted from the beginning of the shard."""
        return replace(self, first=0)

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        if self.shuffle != Shuffle.sample:
            return super().indices(epoch, start, device)
        own = super().indices(epoch, start) + self.first
        if self._lacks_last and start < len(self):
            own = torch.cat([own, torch.tensor([self.first])])
        return own.to(device)

    @property
    def _lacks_last(self) -> bool:
        return bool(len(self)) and not self.count(len(self) - 1)

    def _spans(self, epoch: int, start: int) -> Iterator[slice]:
        for span in islice(super()._spans(epoch, start), len(self) - start):
            if _length(span):
                yield slice(self.first + span.start, self.first + span.stop)
            else:  # nothing is left for this rank
                yield slice(self.first, self.first + 1)
