"""What a configuration does to a dataset before training: a hold-out, and the statistics of its channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitmnist.config.schema import DataConfig
from vitmnist.config.validation import validate
from vitmnist.data.channel_statistics import channel_statistics, check_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError
from vitmnist.runtime.memory import Memory, check_fits


def prepare(dataset: Dataset, data: DataConfig) -> Dataset:
    """The dataset with the hold-out and the statistics that a configuration asks for; raises as these."""
    if data.holdout:
        dataset = held_out(dataset, data.holdout, data.holdout_seed)
    statistics = configured_statistics(data.normalize, dataset.train.images.shape[1])
    return dataset.with_statistics(statistics.mean, statistics.std) if statistics else dataset


def held_out(dataset: Dataset, size: int | float, seed: int) -> Dataset:
    """Make some training images the validation split, and train on the others.

    The channel statistics become those of the remaining training images.

    Args:
        size: a number of images, the last ones; or a share of each class, drawn by `seed` and copied.

    Raises:
        ConfigError: no image would be left to train on, or there is a validation split already.
        DoesNotFitError: there is too little memory for the copy.
    """
    key, whole = f"data.holdout={size}", dataset.train
    if dataset.validation is not None:
        raise ConfigError(
            f"{key}: the dataset has a validation split of {len(dataset.validation):,} images; type data.holdout=null"
        )
    if isinstance(size, int):
        left = len(whole) - size
        if left < 1:
            raise ConfigError(f"{key}: the set has {len(whole)} training images; leave some of them")
        train, validation = whole.taken(slice(left)), whole.taken(slice(left, None))
    elif size < 1:
        check_fits(key, Memory(host=whole.nbytes), torch.device("cpu"))
        drawn = _stratified(whole.labels, size, seed)
        dataset = replace(dataset, folds_of={"holdout": size, **dataset.sha256})
        if not drawn.any():
            raise ConfigError(f"{key}: no class has enough of the {len(whole)} training images; type a larger share")
        train, validation = (whole.taken(rows.nonzero().flatten()) for rows in (~drawn, drawn))
    else:
        raise ConfigError(f"{key}: must be a whole number of images, or a share below 1, such as 0.1")
    dataset = replace(dataset, train=train, validation=validation)
    return dataset.with_statistics(*channel_statistics(train.images))


def _stratified(labels: Tensor, share: float, seed: int) -> Tensor:
    """Which samples are drawn, bool `[N]`: `share` of each class, rounded; one of each stays."""
    generator, drawn = torch.Generator().manual_seed(seed), torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        count = min(round(len(rows) * share), len(rows) - 1)
        drawn[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return drawn


@dataclass
class Statistics:
    """Mean and population standard deviation of each channel, of images scaled to 0…1."""

    mean: list[float]
    std: list[float]


IMAGENET = Statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""The statistics that the weights of torchvision and timm expect."""


def configured_statistics(normalize: object, channels: int | None = None) -> Statistics | None:
    """What `data.normalize` says; None: the statistics of the training images.

    Raises:
        ConfigError: another value, or not for this number of channels, if that is known.
    """
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
