"""The state of the random generators, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

MT19937_SIZE = 624


def torch_rng_state(device: torch.device) -> Tensor:
    """torch's generators of the CPU and of a CUDA device, concatenated: uint8 on the CPU."""
    states = [torch.random.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return torch.cat(states)


def set_torch_rng_state(state: Tensor, device: torch.device) -> None:
    """Restore `torch_rng_state()`; a state without a CUDA generator leaves that as it is."""
    size = len(torch.random.get_rng_state())
    torch.random.set_rng_state(state[:size])
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:], device)


def rng_state() -> dict[str, Any]:
    """The global generators of NumPy and Python, as plain values."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy
    return {"numpy": [name, keys.tolist(), position, has_gauss, gauss], "python": random.getstate()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore `rng_state()`; raises an error of any type for something else."""
    name, keys, position, has_gauss, gauss = state["numpy"]
    if len(keys) != MT19937_SIZE or not 0 <= position <= MT19937_SIZE:  # which NumPy does not check
        raise ValueError("the state of NumPy's generator has another size")
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
