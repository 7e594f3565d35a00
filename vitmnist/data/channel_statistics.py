"""Mean and standard deviation of the channels of images: computed from uint8 `[N, C, H, W]`, or as configured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmnist.errors import ConfigError, DataError

CHANNELS = (1, 3, 4)  # plausible sizes of the last dimension of channels-last images
CHUNK_BYTES = 2**18  # of images whose values are squared and summed at a time


@dataclass
class Statistics:
    """Mean and population standard deviation of each channel, of images scaled to 0…1."""

    mean: list[float]
    std: list[float]


IMAGENET = Statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # as torchvision's and timm's weights expect


def configured_statistics(normalize: object, channels: int | None = None) -> Statistics | None:
    """What `data.normalize` says; None: the statistics of the training images.

    Raises:
        ConfigError: another value, or not for this number of channels, if that is known.
    """
    from vitmnist.config.validation import validate  # imports OmegaConf, which a script may not need

    key = "data.normalize"
    if normalize == "dataset":
        return None
    if normalize != "imagenet" and not isinstance(normalize, Mapping):
        raise ConfigError(f"{key}={normalize}: must be dataset, imagenet, or {{mean: [..], std: [..]}}")
    statistics = IMAGENET
    if isinstance(normalize, Mapping):
        from vitmnist.config.validation import validate  # Not at the top: it imports OmegaConf

        statistics = validate(Statistics, normalize, key)
    sizes = len(statistics.mean), len(statistics.std)
    if sizes[0] != sizes[1] or (channels and sizes[0] != channels):
        needed = f"; the images have {channels} (data.dataset.mode of a folder)" if channels else ""
        raise ConfigError(f"{key}={normalize}: has {sizes[0]} means and {sizes[1]} deviations{needed}")
    if not all(0 <= mean <= 1 for mean in statistics.mean) or not all(0 < std <= 1 for std in statistics.std):
        raise ConfigError(f"{key}={normalize}: must be those of images scaled to 0…1")
    return statistics


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


def channel_sums(images: Tensor) -> NDArray[np.uint64]:
    """Number of pixels, sum and sum of squares by channel, `[3, C]`; those of several batches may be added.

    Raises:
        DataError: the images are not uint8 `[N, C, H, W]`.
    """
    if not isinstance(images, Tensor):
        raise DataError(f"images: must be a tensor, found {type(images).__name__}; torch.from_numpy makes one")
    if images.dtype != torch.uint8:
        raise DataError(
            f"images: mean and std are computed from uint8, found {images.dtype}; the trainer takes only uint8, "
            "and Preprocess the mean= and std= with which floats were normalised"
        )
    check_layout(images.shape)
    sums = np.zeros((3, images.shape[1]), np.uint64)
    sums[0] = images[:, 0].numel()
    # NumPy, in chunks that stay in a core's cache: a tenth of the time of torch, which widens all values first.
    for chunk in images.split(max(1, CHUNK_BYTES // max(1, images[:1].numel()))):
        array = np.ascontiguousarray(chunk.cpu().numpy())
        sums[1] += array.sum((0, 2, 3), dtype=np.uint64)
        sums[2] += np.square(array, dtype=np.uint16).sum((0, 2, 3), dtype=np.uint64)
    return sums


def mean_and_std(sums: NDArray[np.uint64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel, scaled to 0…1, from the results of `channel_sums`.

    Exact up to the last root and division. Raises `DataError` without images.
    """
    if not sums.any():
        raise DataError("the dataset is empty")
    mean, std = [], []
    for pixels, values, squares in sums.T.tolist():  # Python's integers do not overflow
        mean.append(values / (255 * pixels))
        deviation = math.sqrt(squares * pixels - values * values) / pixels
        # A constant channel would divide by zero; one step of a byte keeps it finite.
        std.append((deviation or 1.0) / 255)
    return tuple(mean), tuple(std)


def channel_statistics(images: Tensor | Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images: a tensor or batches; raises as the two above."""
    chunks = [images] if isinstance(images, Tensor) else images
    return mean_and_std(sum(map(channel_sums, chunks), np.zeros((), np.uint64)))
