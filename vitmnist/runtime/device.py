"""The device that a configuration names."""

from __future__ import annotations

import logging
import os

import torch

from vitmnist.errors import ConfigError, first_line
from vitmnist.runtime.world import SINGLE_PROCESS, World

log = logging.getLogger(__name__)


def choose_device(name: str, world: World = SINGLE_PROCESS, sees_its_own: bool = False) -> torch.device:
    """The device that `device=` names; `auto` is the first CUDA device, or the CPU.

    With several ranks on a machine, each gets its own CUDA device.

    Args:
        sees_its_own: the launcher shows this rank other devices than the other ranks of its machine.

    Raises:
        ConfigError: this machine does not have that device, or not enough of them.
    """
    count, is_available = torch.cuda.device_count(), torch.cuda.is_available()
    if name == "auto":
        if count and not is_available:
            log.warning("device=auto: no GPU can be used: %s", _why_unavailable())
        name = "cuda" if is_available else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device={name}: not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, …")
    if device.type == "cpu":
        return device
    if world.size > 1:
        if device.index is not None:
            raise ConfigError(f"device={name}: names one device for {world.size} processes; type device=cuda")
        index = 0 if sees_its_own and count == 1 else world.local_rank
        if index >= count:
            raise ConfigError(
                f"device={name}: rank {world.rank} has no GPU: torch sees {count or 'none'} here; start as many "
                "processes as there are GPUs with torchrun --nproc-per-node, or type device=cpu"
            )
        return torch.device("cuda", index)
    if not is_available:
        raise ConfigError(f"device={name}: {_why_unavailable()}; type device=auto or device=cpu")
    if (device.index or 0) >= count:
        raise ConfigError(f"device={name}: torch sees {count} CUDA devices here; type device=auto or device=cpu")
    return device


def _why_unavailable() -> str:
    """Why torch cannot use CUDA: no driver, one that is too old, a variable that hides the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch sees no CUDA device here{hidden}: {first_line(error).split('. ')[0]}"
    return f"torch sees no CUDA device here{hidden}"
