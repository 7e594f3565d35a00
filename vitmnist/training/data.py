"""The data of a run: the same dataset on all ranks, and the samplers of each rank."""

from __future__ import annotations

from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import Dataset, Split, build_dataset, prepare
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.world import World


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
    checksums = [sums for sums in world.all_gather_object(None if world.local_rank else dataset.sha256) if sums]
    if differing := [name for name in checksums[0] if len({sums[name] for sums in checksums}) > 1]:
        kind = DataError if world.is_main else PeerError  # all ranks find it at once, and rank 0 shows it for all
        raise kind(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")
    return dataset


def train_sampler(config: Config, dataset: Dataset, world: World) -> EpochSampler:
    """The sampler of this rank's part of the training batches; raises `ConfigError` if there is no batch."""
    data = config.data
    options = config.batch_size, config.seed, data.shuffle, data.drop_last
    sampler = EpochSampler(len(dataset.train), *options, world.rank, world.size)
    if not len(sampler):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {sampler.size} training images, so data.drop_last=true leaves "
            f"no batch; type batch_size={sampler.size} or less, or data.drop_last=false"
        )
    return sampler


def eval_sampler(split: Split, batch_size: int, world: World) -> EpochSampler:
    """The sampler of an evaluation: this rank's part of all images, in their order."""
    return EpochSampler(len(split), batch_size, 0, "none", rank=world.rank, ranks=world.size)
