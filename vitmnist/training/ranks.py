"""What the ranks agree on before they train together: configuration, data set, and the part of each batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from vitmnist.config.labels import flatten, to_plain_dict
from vitmnist.config.schema import Config
from vitmnist.data.datasets import Dataset, build_dataset
from vitmnist.data.rank_sampler import RankSampler
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.distributed import SingleProcess


def connect_process_group(config: Config, world: SingleProcess) -> torch.device:
    """Connect the ranks and check that all were started alike; returns this rank's device.

    Raises:
        ConfigError: a rank has another configuration, or no device; the same error on each rank.
    """
    try:
        device, reason = choose_device(config.device, world), None
    except ConfigError as error:
        device, reason = torch.device("cpu"), str(error)
    ranks = world.all_gather_object({"config": flatten(to_plain_dict(config)), "device": device.type, "reason": reason})
    first = ranks[0]
    for number, rank in enumerate(ranks):
        if rank["reason"]:
            raise ConfigError(rank["reason"])
        differing = [
            f"{key}={rank['config'].get(key)} (rank 0: {first['config'].get(key)})"
            for key in sorted(first["config"] | rank["config"])
            # As text, because NaN is not equal to itself.
            if str(rank["config"].get(key)) != str(first["config"].get(key)) and key != "data.root"
        ]
        if rank["device"] != first["device"]:
            differing.append(f"device is {rank['device']} (rank 0: {first['device']})")
        if differing:
            raise ConfigError(
                f"rank {number} was started differently: {', '.join(differing)}; "
                "start every rank with the same arguments"
            )
    world.connect(device, config.distributed.timeout_s)
    return device


def rank_sampler(sampler: EpochSampler, world: SingleProcess) -> EpochSampler:
    """This rank's part of each batch; the sampler itself for a single process."""
    return sampler if world.size == 1 else RankSampler.of(sampler, world.rank, world.size)


def read_dataset(config: Config, world: SingleProcess) -> Dataset:
    """Read the data set. On each machine the first rank verifies the files, then the others read them.

    Raises:
        ConfigError, DataError: it cannot be read, or differs between machines.
    """
    with world.first_on_machine() as is_later:
        dataset = build_dataset(config.data.dataset, config.data.root, verify=not is_later)
        if config.data.holdout:
            dataset = dataset.held_out(config.data.holdout)
        checksums = dataset.sha256 if world.size > 1 and not world.local_rank else None
    if world.size == 1:
        return dataset
    found = [one for one in world.all_gather_object(checksums) if one]
    if differing := [name for name in found[0] if len({one[name] for one in found}) > 1]:
        raise DataError(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")
    # The other ranks of a machine need not compute them again.
    return replace(
        dataset,
        train=replace(dataset.train, sha256=found[0]["train_images"]),
        test=replace(dataset.test, sha256=found[0]["test_images"]),
    )
