"""Random boxes within images, one per image, to crop, erase or paste."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitmnist.augment.keys import random_uniform

NUMBERS_OF_A_BOX = 4  # random numbers that `random_boxes` draws per image; callers number their own from here


class Boxes(NamedTuple):
    """Boxes in pixels, int64 `[B]` each; `bottom` and `right` are excluded."""

    top: Tensor
    left: Tensor
    bottom: Tensor
    right: Tensor

    def mask(self, height: int, width: int) -> Tensor:
        """1 for each pixel of an image of this size that is in its box, else 0: float32 `[B, 1, H, W]`, for `lerp`."""
        rows, columns = (torch.arange(side, device=self.top.device) for side in (height, width))
        in_rows = (rows >= self.top[:, None]) & (rows < self.bottom[:, None])
        in_columns = (columns >= self.left[:, None]) & (columns < self.right[:, None])
        return in_rows.float()[:, None, :, None] * in_columns.float()[:, None, None, :]


def random_boxes(keys: Tensor, scale: Sequence[float], ratio: Sequence[float], height: int, width: int) -> Boxes:
    """Boxes anywhere in images of this size, of a random area and shape.

    A box that would be longer than a side of the image is shortened to it; torchvision draws again, up to ten times.

    Args:
        scale: least and greatest share of the image's area, drawn uniformly.
        ratio: least and greatest width over height, its logarithm drawn uniformly.
    """
    # In float64, so that rounding to pixels is the same on every device.
    area = random_uniform(keys, 0, *scale) * (height * width)
    aspect = random_uniform(keys, 1, *map(math.log, ratio)).exp()
    box_height = (area / aspect).sqrt().round().clamp(1, height)
    box_width = (area * aspect).sqrt().round().clamp(1, width)
    top = (random_uniform(keys, 2) * (height - box_height + 1)).long()
    left = (random_uniform(keys, 3) * (width - box_width + 1)).long()
    return Boxes(top, left, top + box_height.long(), left + box_width.long())
