"""Random erasing: hides a box of an image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitmnist.augment.base import OPERATIONS, Operation
from vitmnist.augment.boxes import NUMBERS_OF_A_BOX, Boxes, random_boxes
from vitmnist.augment.keys import random_uniform
from vitmnist.config.validation import bounded


@dataclass
class RandomErasingOptions:
    """p: probability. scale: area of the box as a share of the image's. ratio: its height over width."""

    p: float = bounded(0.5, at_least=0, at_most=1)
    scale: tuple[float, float] = bounded((0.02, 0.33), at_least=0, at_most=1)
    ratio: tuple[float, float] = bounded((0.3, 3.3), above=0)


@OPERATIONS.register("random_erasing", RandomErasingOptions)
class RandomErasing(Operation):
    """Makes a random box of an image black, with probability `p` (Zhong et al., arXiv:1708.04896)."""

    def __init__(self, options: RandomErasingOptions) -> None:
        super().__init__()
        self.options = options

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        lowest, highest = self.options.ratio
        boxes = random_boxes(keys, self.options.scale, (1 / highest, 1 / lowest), height, width)
        return *boxes, random_uniform(keys, NUMBERS_OF_A_BOX) < self.options.p

    def forward(self, images: Tensor, *drawn: Tensor) -> Tensor:
        *box, is_erased = drawn
        return images * (1 - Boxes(*box).mask(*images.shape[2:]) * is_erased[:, None, None, None])
