"""Checks a state that was read from a file."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_alike(state: Any, own: Any, name: str = "state") -> None:
    """Compare a state with `own`: structure, types, and the shape and dtype of each tensor.

    torch loads an optimizer's tensors of any shape, and a kernel may then write out of bounds.

    Raises:
        ValueError: names the first difference.
    """
    if isinstance(own, dict) and isinstance(state, dict):
        if differing := state.keys() ^ own.keys():
            raise ValueError(f"{name}: {', '.join(sorted(map(str, differing)))} is missing or unknown")
        for key, value in own.items():
            check_alike(state[key], value, f"{name}.{key}")
    elif type(state) is not type(own):
        raise ValueError(f"{name}: is {type(state).__name__}, not {type(own).__name__}")
    elif isinstance(own, list | tuple):
        for index, (one, value) in enumerate(zip(state, own, strict=True)):
            check_alike(one, value, f"{name}.{index}")
    elif isinstance(own, Tensor) and (state.shape, state.dtype) != (own.shape, own.dtype):
        raise ValueError(f"{name}: is {list(state.shape)} of {state.dtype}, not {list(own.shape)} of {own.dtype}")
