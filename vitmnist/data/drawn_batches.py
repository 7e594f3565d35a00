"""The indices that a torch `DataLoader` draws for its batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitmnist.config.schema import Shuffle


class DrawnBatches:
    """The batches of indices of a DataLoader's own batch sampler, in place of an `EpochSampler`."""

    shuffle = Shuffle.batch  # their sizes may differ, so loaders take them one by one

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.size = len(dataloader.dataset)  # type: ignore[arg-type]
        self.batch_size = dataloader.batch_size or 1
        self.seed = 0
        self._dataloader = dataloader
        self._epochs: dict[int, list[Tensor]] = {}
        self._next = count()

    def __len__(self) -> int:
        return len(self._dataloader)

    def draw(self) -> int:
        """Draw the indices of the next epoch; returns its number."""
        number = next(self._next)
        # A DataLoader draws a seed for its workers before it iterates its sampler; so the order is the same.
        torch.empty((), dtype=torch.int64).random_(generator=self._dataloader.generator)
        self._epochs[number] = [torch.tensor(list(batch)) for batch in self._dataloader.batch_sampler or ()]
        return number

    def batches(self, number: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """The indices of each batch of an epoch that was drawn: int64 `[B]`."""
        drawn = self._epochs.pop(number)[start:]
        sizes = [len(indices) for indices in drawn]
        yield from torch.cat([torch.arange(0), *drawn]).to(device).split(sizes)
