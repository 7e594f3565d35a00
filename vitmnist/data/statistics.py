"""Channel statistics of a set of images."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel of uint8 `[N, C, H, W]`, scaled to 0…1.

    Exact up to the last root and division: the sums are of integers, in pieces that stay small in memory.
    """
    pixels = images.numel() // images.shape[1]
    total = torch.zeros(images.shape[1], dtype=torch.int64)
    squares = torch.zeros_like(total)
    for piece in images.split(1000):
        wide = piece.to(torch.int32)
        total += wide.sum(dim=(0, 2, 3))
        squares += wide.square_().sum(dim=(0, 2, 3))
    mean, std = [], []
    for first, second in zip(total.tolist(), squares.tolist(), strict=True):
        mean.append(first / (255 * pixels))
        deviation = math.sqrt(second * pixels - first * first) / pixels
        # A constant channel carries nothing; one step of a byte in place of zero keeps it finite.
        std.append((deviation or 1.0) / 255)
    return tuple(mean), tuple(std)
