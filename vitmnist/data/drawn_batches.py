"""The indices that a torch `DataLoader` draws for its batches."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitmnist.config.schema import Shuffle
from vitmnist.errors import DataError


class DrawnBatches:
    """The indices of a DataLoader's batches, drawn as it would draw them; replaces the sampler of a loader.

    The batch sampler may use random generators that the training loop also uses. So it is asked for indices exactly
    when the DataLoader would ask: once per batch that its workers prefetch, then once per batch that is delivered.

    Args:
        least_ahead: how many index batches are drawn ahead at least.
    """

    shuffle = Shuffle.batch  # the sizes of batches may differ, so loaders take them one by one
    seed = 0  # unused: samples that are kept are not random

    def __init__(self, dataloader: DataLoader[Any], least_ahead: int = 0) -> None:
        self.size = len(dataloader.dataset)  # type: ignore[arg-type]
        self.batch_size = dataloader.batch_size or 1
        self._dataloader = dataloader
        self._ahead = max(dataloader.num_workers * (dataloader.prefetch_factor or 0), least_ahead)
        self._begun: dict[int, tuple[deque[Any], Iterator[Any]]] = {}
        self._numbers = count()
        self._has_seed = False

    def __len__(self) -> int:
        return len(self._dataloader)

    def begin_epoch(self) -> int:
        """Draw what the DataLoader draws when it is iterated; returns the number to give to `batches`."""
        number, dataloader = next(self._numbers), self._dataloader
        if not (self._has_seed and dataloader.persistent_workers):  # the seed of its workers, which these keep
            torch.empty((), dtype=torch.int64).random_(generator=dataloader.generator)
        self._has_seed = True
        batches = iter(dataloader.batch_sampler or ())
        self._begun[number] = deque(islice(batches, self._ahead)), batches
        return number

    def batches(self, number: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """The indices of each batch of an epoch that was begun: int64 `[B]`.

        Raises:
            DataError: they are not whole numbers from 0 to the size of the data set.
        """
        ahead, batches = self._begun.pop(number)
        if not self._ahead:
            yield from (self._as_indices(batch, device) for batch in batches)
        while ahead:
            batch = ahead.popleft()
            ahead.extend(islice(batches, 1))
            yield self._as_indices(batch, device)

    def _as_indices(self, batch: Any, device: torch.device | str) -> Tensor:
        try:
            numbers = array("q", batch)  # of 256 numbers, a third of the time of torch.tensor
        except TypeError as error:
            raise DataError(f"the batch sampler gives {batch}, not the indices of samples") from error
        if not numbers:
            return torch.zeros(0, dtype=torch.int64, device=device)
        if not 0 <= min(numbers) <= max(numbers) < self.size:
            raise DataError(f"the batch sampler gives {batch}, but the data set has the indices 0 to {self.size - 1}")
        return torch.frombuffer(numbers, dtype=torch.int64).to(device, non_blocking=True)
