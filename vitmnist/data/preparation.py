"""The data of a run: the same dataset on all ranks, its hold-out, its channel statistics, and its samplers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.schema import Config, DataConfig
from vitmnist.config.validation import validate
from vitmnist.data.channel_statistics import channel_statistics
from vitmnist.data.datasets.base import Dataset, Split, build_dataset
from vitmnist.data.sampler import EpochSampler, RankSampler
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.runtime.world import World


@dataclass
class Statistics:
    """Mean and standard deviation of each channel, of images scaled to 0…1."""

    mean: list[float]
    std: list[float]


IMAGENET = Statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # as torchvision's and timm's weights expect


def prepare(dataset: Dataset, data: DataConfig) -> Dataset:
    """The dataset with the hold-out and the statistics that a configuration asks for; raises as these."""
    if data.holdout:
        dataset = held_out(dataset, data.holdout, data.holdout_seed)
    channels = dataset.train.images.shape[1]
    return with_statistics(dataset, given_statistics(data.normalize, channels))


def read_dataset(config: Config, world: World) -> Dataset:
    """Read the dataset. On each machine the first rank downloads or decodes it, then the others read the files.

    Raises:
        ConfigError, DataError: it cannot be read or evaluated, or differs between machines.
    """
    if world.local_rank:
        world.barrier()
    dataset = build_dataset(config.data.dataset, config.data.root)
    if not world.local_rank:
        world.barrier()
    dataset = prepare(dataset, config.data)
    if dataset.eval_split == "train":
        raise ConfigError(f"{dataset.name}: has neither validation nor test images; type data.holdout=0.1")
    if config.patience and dataset.validation is None:
        raise ConfigError(
            f"patience={config.patience}: needs a validation split, or the test split would choose the epoch; type "
            "data.holdout=0.1 to hold out a tenth of the training images, or keep a folder val/ next to train/"
        )
    if world.size == 1:
        return dataset
    checksums = [sums for sums in world.all_gather_object(None if world.local_rank else dataset.sha256) if sums]
    if differing := [name for name in checksums[0] if len({sums[name] for sums in checksums}) > 1]:
        kind = DataError if world.is_main else PeerError  # all ranks find it at once, and rank 0 shows it for all
        raise kind(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")
    # The other ranks of a machine need not compute them again.
    splits: dict[str, Any] = {
        name: replace(split, sha256=checksums[0][f"{name}_images"]) for name, split in dataset.splits.items()
    }
    return replace(dataset, **splits)


def train_sampler(config: Config, dataset: Dataset, world: World) -> EpochSampler:
    """The sampler of this rank's part of the training batches; raises `ConfigError` if there is no batch."""
    data = config.data
    sampler = EpochSampler(len(dataset.train), config.batch_size, config.seed, data.shuffle, data.drop_last)
    if not len(sampler):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {sampler.size} training images, so data.drop_last=true leaves "
            f"no batch; type batch_size={sampler.size} or less, or data.drop_last=false"
        )
    return RankSampler.of(sampler, world.rank, world.size)


def eval_sampler(split: Split, batch_size: int, world: World) -> EpochSampler:
    """The sampler of an evaluation: this rank's part of all images, in their order."""
    return RankSampler.of(EpochSampler(len(split), batch_size, 0, "none"), world.rank, world.size)


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
        train, validation = whole.part(slice(left)), whole.part(slice(left, None))
    elif size < 1:
        check_fits(key, Memory(host=whole.nbytes), torch.device("cpu"))
        drawn = _stratified(whole.labels, size, seed)
        dataset = replace(dataset, folds_of={"holdout": size, **dataset.sha256})
        if not drawn.any():
            raise ConfigError(f"{key}: no class has enough of the {len(whole)} training images; type a larger share")
        train, validation = (whole.taken(rows.nonzero().flatten()) for rows in (~drawn, drawn))
    else:
        raise ConfigError(f"{key}: must be a whole number of images, or a share below 1, such as 0.1")
    mean, std = channel_statistics(train.images)
    return with_statistics(replace(dataset, train=train, validation=validation), Statistics([*mean], [*std]))


def _stratified(labels: Tensor, share: float, seed: int) -> Tensor:
    """Which samples are drawn, bool `[N]`: `share` of each class, rounded; one of each stays."""
    generator, drawn = torch.Generator().manual_seed(seed), torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        count = min(round(len(rows) * share), len(rows) - 1)
        drawn[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return drawn


def given_statistics(normalize: Any, channels: int | None = None) -> Statistics | None:
    """What `data.normalize` says; None: the statistics of the training images.

    Raises:
        ConfigError: another value, or not for this number of channels, if that is known.
    """
    key = "data.normalize"
    if normalize == "dataset":
        return None
    if normalize != "imagenet" and not isinstance(normalize, Mapping):
        raise ConfigError(f"{key}={normalize}: must be dataset, imagenet, or {{mean: [..], std: [..]}}")
    given = IMAGENET if normalize == "imagenet" else validate(Statistics, normalize, key)
    if len(given.mean) != len(given.std) or (channels and len(given.mean) != channels):
        found = f"; the images have {channels} (data.dataset.mode of a folder)" if channels else ""
        raise ConfigError(f"{key}={normalize}: has {len(given.mean)} means and {len(given.std)} deviations{found}")
    if not all(0 <= mean <= 1 for mean in given.mean) or not all(0 < std <= 1 for std in given.std):
        raise ConfigError(f"{key}={normalize}: must be those of images scaled to 0…1")
    return given


def with_statistics(dataset: Dataset, given: Statistics | None) -> Dataset:
    """The dataset with these statistics of its channels in every split; None: with its own."""
    if given is None:
        return dataset
    mean, std = tuple(given.mean), tuple(given.std)
    splits: dict[str, Any] = {name: replace(split, mean=mean, std=std) for name, split in dataset.splits.items()}
    return replace(dataset, **splits)
