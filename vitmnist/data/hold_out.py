"""Draws a validation split from the training images: a number of images, a share of each class, or a fold."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.schema import DataConfig
from vitmnist.data.channel_statistics import compute_statistics, resolve_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError, join_names
from vitmnist.runtime.memory import check_fits


def hold_out_and_normalize(dataset: Dataset, data: DataConfig) -> Dataset:
    """Apply the hold-out or the fold, and the channel statistics, of a configuration to a dataset.

    Raises:
        ConfigError: the hold-out, the fold or the statistics are impossible for this dataset, or it has a validation
            split already.
        OutOfSpaceError: there is too little memory for the hold-out.
    """
    if data.folds or data.fold is not None:
        dataset = hold_out_fold(dataset, data)
    elif data.holdout:
        dataset = hold_out_validation(dataset, data.holdout, data.holdout_seed)
    statistics = resolve_statistics(data.normalize, dataset.train.images.shape[1])
    return dataset.with_statistics(statistics.mean, statistics.std) if statistics else dataset


def hold_out_validation(dataset: Dataset, size: int | float, seed: int) -> Dataset:
    """Draw a validation split from the training images; both splits are copied into memory.

    The channel statistics are computed again from the remaining training images.

    Args:
        size: a number of images, or below 1 a fraction of each class.
        seed: seeds the random choice of the images.
    """
    key, train = f"data.holdout={size}", dataset.train
    if dataset.folds:
        raise ConfigError(f"{key}: would divide folds of the table; set data.fold=N or data.dataset.columns.fold=null")
    generator = torch.Generator().manual_seed(seed)
    is_held_out = torch.zeros(len(train), dtype=torch.bool)
    if isinstance(size, int) and size > 1:
        is_held_out[torch.randperm(len(train), generator=generator)[:size]] = True
    elif size >= 1:
        raise ConfigError(f"{key}: must be a number of images above 1, or a share below 1, such as 0.1")
    else:
        for label in train.labels.unique():
            rows = (train.labels == label).nonzero().flatten()
            count = min(round(len(rows) * size), len(rows) - 1)  # Leave at least one image of each class for training.
            is_held_out[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return _hold_out(dataset, key, is_held_out, {"holdout": size})


def hold_out_fold(dataset: Dataset, data: DataConfig) -> Dataset:
    """Make a fold of the training images the validation split; see `hold_out_validation`.

    `data.folds` draws folds; without it, the folds of the dataset are used.
    """
    key, train = f"data.folds={data.folds} data.fold={data.fold}".replace("None", "null"), dataset.train
    if data.holdout:
        raise ConfigError(f"{key}: data.holdout={data.holdout} draws another validation split; set it to null")
    if data.folds:
        shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(data.holdout_seed))
        by_class = shuffled[train.labels[shuffled].argsort(stable=True)]
        # Deal out the images of one class after the other: the folds of a class, and all folds, differ by one image.
        folds = torch.empty_like(by_class).scatter_(0, by_class, torch.arange(len(train)) % data.folds)
    elif dataset.folds:
        folds = torch.tensor([dataset.folds.get(train.sample_name(index), -1) for index in range(len(train))])
    else:
        raise ConfigError(f"{key}: there are no folds; set data.folds=5, or give a table of labels a column of folds")
    fold_indices = [fold for fold in folds.unique().tolist() if fold >= 0]
    if data.fold is None or data.fold not in fold_indices:
        raise ConfigError(f"{key}: data.fold must be one of {join_names(fold_indices)}; -m trains several")
    return _hold_out(dataset, key, folds.eq(data.fold), {"folds": len(fold_indices)})


def _hold_out(dataset: Dataset, overrides: str, is_held_out: Tensor, setting: dict[str, Any]) -> Dataset:
    """Move images from the training to the validation split; `overrides`, separated by blanks, begin the messages."""
    train, validation = dataset.train, dataset.validation
    if validation is not None:
        unset = " ".join(f"{override.partition('=')[0]}=null" for override in overrides.split())
        raise ConfigError(f"{overrides}: the dataset has a validation split of {len(validation):,} images; set {unset}")
    if not is_held_out.any():
        raise ConfigError(f"{overrides}: no class has enough of the {len(train)} training images; set a larger share")
    if is_held_out.all():
        raise ConfigError(f"{overrides}: leaves none of the {len(train)} training images")
    check_fits(overrides, train.nbytes, torch.device("cpu"))
    held_out = replace(
        dataset,
        train=train.subset((~is_held_out).nonzero().flatten()),
        validation=train.subset(is_held_out.nonzero().flatten()),
        division={**setting, **dataset.sha256},
    )
    return held_out.with_statistics(*compute_statistics(held_out.train.images))
