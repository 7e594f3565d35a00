"""What the ranks agree on before they train together: device and dataset."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import torch

from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import Dataset, build_dataset
from vitmnist.data.preparation import prepare
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.world import World


def agree_on_device(config: Config, world: World) -> torch.device:
    """This rank's device; all ranks have one of the same type.

    Raises:
        ConfigError: a rank has no device, or one of another type; the same error on each rank.
    """
    visible = world.all_gather_object((socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")))
    try:
        device, reason = choose_device(config.device, world, visible.count(visible[world.rank]) == 1), None
    except ConfigError as error:
        device, reason = torch.device("cpu"), str(error)
    ranks = world.all_gather_object((reason, device.type))
    for number, (reason, kind) in enumerate(ranks):
        if reason:
            raise ConfigError(reason)
        if kind != ranks[0][1]:
            raise ConfigError(
                f"device={config.device}: is {ranks[0][1]} on rank 0 and {kind} on rank {number}; name one"
            )
    if world.size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def read_dataset(config: Config, world: World) -> Dataset:
    """Read the dataset. On each machine the first rank downloads or decodes it, then the others read the files.

    Raises:
        ConfigError, DataError: it cannot be read, or differs between machines.
    """
    if world.local_rank:
        world.barrier()
    dataset = build_dataset(config.data.dataset, config.data.root)
    if not world.local_rank:
        world.barrier()
    dataset = prepare(dataset, config.data)
    if world.size == 1:
        return dataset
    found = [one for one in world.all_gather_object(None if world.local_rank else dataset.sha256) if one]
    if differing := [name for name in found[0] if len({one[name] for one in found}) > 1]:
        raise DataError(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")
    # The other ranks of a machine need not compute them again.
    splits: dict[str, Any] = {
        name: replace(split, sha256=found[0][f"{name}_images"]) for name, split in dataset.splits.items()
    }
    return replace(dataset, **splits)
