"""Small datasets whose samples are the index, or a function of it."""

from collections.abc import Callable
from typing import Any

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


class Made(Dataset[Any]):
    """Samples that a function makes of their index. Counts the reads in this process."""

    reads = 0

    def __init__(self, make: Callable[[int], Any], size: int = 40) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.make(index)
