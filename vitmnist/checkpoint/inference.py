"""A model that a run has trained, with what is needed to use it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vitmnist.checkpoint import storage as checkpoint
from vitmnist.data.datasets import Split
from vitmnist.errors import ConfigError, DataError
from vitmnist.models import MODELS

WEIGHTS = ("final", "best", "last")


@dataclass(frozen=True)
class InferenceModel:
    """A model in evaluation mode on its device, the images it takes, and the classes it knows."""

    model: nn.Module
    path: Path
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalising(self, split: Split) -> Split:
        """`split` with the channel statistics that the model was trained with.

        Raises:
            ConfigError: its images or classes are not those of the model.
        """
        if tuple(split.images.shape[1:]) != self.shape or len(split.classes) != len(self.classes):
            raise ConfigError(
                f"the model takes images {list(self.shape)} of {len(self.classes)} classes, the data set has "
                f"{list(split.images.shape[1:])} of {len(split.classes)}"
            )
        return replace(split, mean=self.mean, std=self.std)


def load_inference_model(folder: Path, device: torch.device, weights: str | None = None) -> InferenceModel:
    """The model of a run.

    Args:
        folder: of the run.
        weights: final, best or last; None takes the first of them that there is.

    Raises:
        ConfigError: the folder holds no such weights.
        DataError: they are damaged.
    """
    place = folder / checkpoint.FOLDER
    paths = {name: place / (f"{name}.safetensors" if name == "final" else f"{name}.pt") for name in WEIGHTS}
    there = [name for name in ([weights] if weights else WEIGHTS) if paths[name].is_file()]
    if not there:
        wanted = weights or "final, best or last"
        raise ConfigError(f"{folder}: holds no {wanted} weights in {checkpoint.FOLDER}/; name the folder of a run")
    path = paths[there[0]]
    facts, tensors = _read_final(path) if there[0] == "final" else _read_checkpoint(path)
    try:
        channels, height, width = map(int, facts["shape"])
        model = MODELS.build(facts["config"]["model"], (channels, height, width), len(facts["classes"]))
        model.load_state_dict(tensors)
        return InferenceModel(
            model=model.eval().to(device),
            path=path,
            shape=(channels, height, width),
            classes=tuple(map(str, facts["classes"])),
            mean=tuple(float(facts["mean"][channel]) for channel in range(channels)),
            std=tuple(float(facts["std"][channel]) for channel in range(channels)),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, ConfigError) as error:
        raise DataError(f"{path}: its weights do not fit what it says of itself: {error}") from error


def _read_final(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["vitmnist"])
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict, only keys()
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: is damaged, or not of this program: {error}") from error


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    state = checkpoint.read(path)
    try:
        return json.loads(state["facts"]), (state.get("average") or state)["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: is not of this program: {error}") from error
