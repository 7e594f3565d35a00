"""Mean and standard deviation of the channels of uint8 images `[N, C, H, W]`, and the check of this layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitmnist.errors import DataError

CHANNELS = (1, 3, 4)  # plausible sizes of the last dimension of channels-last images
CHUNK_BYTES = 2**18  # of images whose values are squared and summed at a time


def check_layout(shape: Sequence[int], channels: int | None = None) -> None:
    """Raise `DataError` if images of this shape are not `[B, C, H, W]` with `channels` channels (None: any number)."""
    problem = f"images: must be [B, C, H, W], found {list(shape)}"
    if len(shape) == 3:
        raise DataError(
            f"{problem}; images.unsqueeze(1) adds the channels, images.unsqueeze(0) makes one image a batch"
        )
    if len(shape) != 4:
        raise DataError(problem)
    plausible = CHANNELS if channels is None else (channels,)
    if shape[1] not in plausible and shape[3] in plausible:
        raise DataError(f"{problem}, with the channels last; images.permute(0, 3, 1, 2) puts them first")
    if channels is not None and shape[1] != channels:
        raise DataError(
            f"images: {shape[1]} channel(s) {list(shape)}, but the mean and std are of {channels}; "
            "build Preprocess from the data that it is given, or with their mean= and std="
        )


@dataclass(frozen=True)
class ChannelSums:
    """Sums of uint8 images by channel, from which `statistics` follow; integers, so exact in any order."""

    pixels: int = 0
    values: Any = 0
    squares: Any = 0

    @classmethod
    def of(cls, images: Tensor) -> ChannelSums:
        """The sums of uint8 `[N, C, H, W]`.

        Raises:
            DataError: another dtype or layout.
        """
        if not isinstance(images, Tensor):
            raise DataError(f"images: must be a tensor, found {type(images).__name__}; torch.from_numpy makes one")
        if images.dtype != torch.uint8:
            raise DataError(
                f"images: mean and std are computed from uint8, found {images.dtype}; the trainer takes only uint8, "
                "and Preprocess the mean= and std= with which floats were normalised"
            )
        check_layout(images.shape)
        # NumPy, in chunks that stay in a core's cache: a tenth of the time of torch, which widens all values first.
        axes, values, squares = (0, 2, 3), np.zeros(images.shape[1], np.uint64), np.zeros(images.shape[1], np.uint64)
        for chunk in images.split(max(1, CHUNK_BYTES // max(1, images[:1].numel()))):
            array = np.ascontiguousarray(chunk.cpu().numpy())
            values += array.sum(axes, dtype=np.uint64)
            squares += np.square(array, dtype=np.uint16).sum(axes, dtype=np.uint64)
        return cls(images[:, 0].numel(), values, squares)

    def __add__(self, other: ChannelSums) -> ChannelSums:
        return ChannelSums(self.pixels + other.pixels, self.values + other.values, self.squares + other.squares)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and population standard deviation of each channel, scaled to 0…1; raises `DataError` without images."""
        if not self.pixels:
            raise DataError("the dataset is empty")
        mean, std = [], []
        for value_sum, square_sum in zip(self.values.tolist(), self.squares.tolist(), strict=True):
            mean.append(value_sum / (255 * self.pixels))
            deviation = math.sqrt(square_sum * self.pixels - value_sum * value_sum) / self.pixels
            # A constant channel would divide by zero; one step of a byte keeps it finite.
            std.append((deviation or 1.0) / 255)
        return tuple(mean), tuple(std)


def channel_statistics(images: Tensor | Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel of uint8 `[N, C, H, W]`, scaled to 0…1.

    Exact up to the last root and division.

    Args:
        images: one tensor, or batches.

    Raises:
        DataError: another dtype or layout, or no image.
    """
    chunks = [images] if isinstance(images, Tensor) else images
    return sum(map(ChannelSums.of, chunks), ChannelSums()).statistics()
