"""Small datasets whose samples are the index, or a function of it."""

from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 43


class Pairs(Dataset[tuple[Tensor, int]]):
    classes = ("even", "odd")

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2, 2), index, dtype=torch.uint8), index


class WithEpochs(Pairs):
    """A dataset that changes with the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Made(Dataset[Any]):
    """Samples that a function makes of their index. Lists the reads in this process."""

    def __init__(self, make: Callable[[int], Any], size: int = 40) -> None:
        self.make, self.size, self.reads = make, size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.make(index)

    def __getstate__(self) -> bytes:
        # Only cloudpickle can pickle a lambda for a worker.
        return cloudpickle.dumps(self.__dict__)

    def __setstate__(self, state: bytes) -> None:
        self.__dict__ |= cloudpickle.loads(state)
