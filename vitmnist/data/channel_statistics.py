"""Computes the mean and standard deviation of image channels, or takes them from the configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmnist.errors import ConfigError, DataError

PLAUSIBLE_CHANNELS = (1, 3, 4)
"""Channel counts by which images `[B, C, H, W]` are distinguished from `[B, H, W, C]`."""


def check_layout(shape: Sequence[int], channels: int | None = None) -> None:
    """Raise `DataError` unless images of this shape are `[B, C, H, W]`; `channels` is the expected C, if known."""
    plausible = PLAUSIBLE_CHANNELS if channels is None else (channels,)
    fits = len(shape) == 4 and (shape[1] in plausible or (channels is None and shape[3] not in plausible))
    if not fits:
        statistics = f", because mean and std have {channels} channel(s)" if channels else ""
        raise DataError(
            f"images: must be [B, {channels or 'C'}, H, W]{statistics}, found {list(shape)}; images.unsqueeze(1) adds "
            "the channels, images.permute(0, 3, 1, 2) puts them first"
        )


def check_statistics(key: str, mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise `ConfigError` unless these can be the means and deviations of the channels of images scaled to 0…1."""
    are_possible = all(0 <= value <= 1 for value in mean) and all(0 < value <= 1 for value in std)
    if len(mean) != len(std) or not mean or not are_possible:
        raise ConfigError(
            f"{key}: has the means {[*mean]} and the deviations {[*std]}; must be a mean and a deviation per channel, "
            "of images scaled to 0…1: mean 0 to 1, std above 0 and at most 1"
        )


def sum_channels(images: Tensor) -> NDArray[np.uint64]:
    """Return number, sum and sum of squares of the pixels per channel, `[3, C]`; sums of batches can be added.

    Raises `DataError` unless the images are uint8 `[N, C, H, W]`.
    """
    if images.dtype != torch.uint8:
        raise DataError(
            f"images: mean and std are computed from uint8, found {images.dtype}; the trainer takes only uint8, "
            "and Preprocess the mean= and std= with which floats were normalised"
        )
    check_layout(images.shape)
    sums = np.zeros((3, images.shape[1]), np.uint64)
    sums[0] = images[:, 0].numel()
    # NumPy, in chunks that fit into a core's cache, takes a tenth of torch's time: torch widens all values first.
    for chunk in images.split(max(1, 2**18 // max(1, images[:1].numel()))):
        array = np.ascontiguousarray(chunk.cpu().numpy())
        sums[1] += array.sum((0, 2, 3), dtype=np.uint64)
        sums[2] += np.square(array, dtype=np.uint16).sum((0, 2, 3), dtype=np.uint64)
    return sums


def compute_mean_and_std(sums: NDArray[np.uint64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and population standard deviation per channel, scaled to 0…1, from sums of `sum_channels`.

    The results are exact up to the last root and division. Raises `DataError` if there are no images.
    """
    if not sums.any():
        raise DataError("the dataset is empty")
    mean, std = [], []
    for pixels, values, squares in sums.T.tolist():  # Python's integers do not overflow.
        mean.append(values / (255 * pixels))
        deviation = math.sqrt(squares * pixels - values * values) / pixels
        # A constant channel gets the deviation of one grey level, because normalising divides by it.
        std.append((deviation or 1.0) / 255)
    return tuple(mean), tuple(std)


def compute_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel; raises errors of `sum_channels`, `compute_mean_and_std`."""
    return compute_mean_and_std(sum_channels(images))


@dataclass
class Statistics:
    """Mean and population standard deviation of each channel, of images scaled to 0…1."""

    mean: list[float]
    std: list[float]


IMAGENET = Statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""The statistics that the weights of torchvision and timm expect."""


def resolve_statistics(normalize: object, channels: int | None = None) -> Statistics | None:
    """Return the statistics that `data.normalize` names; None means statistics of the training images.

    Raises:
        ConfigError: the value cannot be used, or the statistics have another number of channels than `channels`.
    """
    from vitmnist.config.validation import validate  # Not at the top: it imports OmegaConf.

    key = "data.normalize"
    if normalize == "dataset":
        return None
    if normalize != "imagenet" and not isinstance(normalize, Mapping):
        raise ConfigError(f"{key}={normalize}: must be dataset, imagenet, or {{mean: [..], std: [..]}}")
    statistics = validate(Statistics, normalize, key) if isinstance(normalize, Mapping) else IMAGENET
    check_statistics(key, statistics.mean, statistics.std)
    if channels and len(statistics.mean) != channels:
        raise ConfigError(
            f"{key}={normalize}: has {len(statistics.mean)} means, and the images have {channels} channels "
            "(data.dataset.mode of a folder)"
        )
    return statistics
