"""The state of the global random generators, for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def torch_state(device: torch.device) -> Tensor:
    """The state of torch's generators of the CPU and of a CUDA device, one after the other: uint8 on the CPU."""
    states = [torch.random.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return torch.cat(states)


def set_torch_state(state: Tensor, device: torch.device) -> None:
    """Put torch's generators where `torch_state` found them, those that there are now."""
    host = len(torch.random.get_rng_state())
    torch.random.set_rng_state(state[:host])
    if device.type == "cuda" and len(state) > host:
        torch.cuda.set_rng_state(state[host:], device)


def random_state() -> dict[str, Any]:
    """The state of every global generator, as plain values."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy
    return {
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put every global generator where `random_state` found it."""
    torch.random.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
