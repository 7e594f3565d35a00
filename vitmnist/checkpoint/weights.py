"""Reads the weights in the files of a run, and for `init` those in files of any origin."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from vitmnist.checkpoint.storage import FOLDER, read, reporting_damage
from vitmnist.errors import ConfigError, DataError, join_names
from vitmnist.runtime.files import home_expanded

log = logging.getLogger(__name__)

WEIGHTS = {"best": "best.pt", "final": "final.safetensors", "last": "last.pt"}
"""The file of each kind of weights that a run has."""
WRAPPERS = ("step", "ema", "state_dict_ema", "state_dict", "model_state_dict", "model", "net")
"""The keys under which checkpoints hold weights (ours, timm's, Lightning's, a script's), averaged weights first."""


def read_initial_weights(init: str) -> dict[str, torch.Tensor]:
    """The weights and statistics in a file, or the best, else the final ones of a run's folder.

    Raises:
        ConfigError: there are none.
        DataError: they are damaged.
    """
    path = home_expanded(init)
    if is_run := path.is_dir():
        path = weights_file(path, ["best", "final"])
    elif not path.exists():
        raise ConfigError(f"init={init}: there is no such file or folder")
    elif path.suffix not in (".safetensors", ".pt", ".pth") or not path.is_file():
        raise ConfigError(f"init={init}: is not a .safetensors, .pt or .pth file, nor the folder of a run")
    with reporting_damage(path):
        tensors = read_weights(path)[1] if is_run else _read_foreign(path)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("some weights are not finite")
        return tensors


def _read_foreign(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file, within a `.pt` or `.pth` file from the first of `WRAPPERS`; unpickling runs no code."""
    if path.suffix == ".safetensors":
        return load_file(path)
    with safe_globals([Namespace]):  # of timm's checkpoints: the arguments of its command
        if is_zipfile(path) and (classes := get_unsafe_globals_in_checkpoint(path)):
            save = f"torch.save(torch.load({str(path)!r}, weights_only=False)['state_dict'], 'weights.pth')"
            raise DataError(
                f"{path}: has objects of {', '.join(classes)}, which may run code when they are read; if you trust it, "
                f'save its weights alone: python -c "import torch; {save}", and set init=weights.pth'
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
    while key := next((key for key in WRAPPERS if isinstance(state, dict) and isinstance(state.get(key), dict)), None):
        state = state[key]
        log.info("init: the weights are those under %s", key)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        held = f"a {type(state).__name__}"
        if isinstance(state, dict):
            held = f"its keys are {join_names(map(str, state))}"
        raise DataError(f"{path}: holds no tensors by name, neither at the top nor under {', '.join(WRAPPERS)}; {held}")
    return state


def weights_file(folder: Path, names: Sequence[str]) -> Path:
    """The first of these weights that a run has; raises `ConfigError` if it has none."""
    for name in names:
        if (path := folder / FOLDER / WEIGHTS[name]).is_file():
            return path
    raise ConfigError(
        f"{folder}: holds no {' or '.join(names)} weights in {FOLDER}/: it is not the folder of a run, or the "
        "run has saved none"
    )


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `model_info` and the weights of a file; the averaged weights if it has any."""
    if path.suffix == ".pt":
        state = read(path)
        return state["model_info"], (state["step"]["ema"] or state["step"])["model"]
    with safe_open(path, framework="pt") as file:
        info = json.loads((file.metadata() or {})["vitmnist"])
        return info, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict, only keys()
