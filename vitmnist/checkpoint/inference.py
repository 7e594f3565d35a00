"""Loads a trained model with everything that is needed to use it, or weights to start from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from vitmnist.checkpoint import storage
from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import DATASETS, Split
from vitmnist.errors import ConfigError, DataError, UserError
from vitmnist.models.base import MODELS
from vitmnist.runtime.failures import classify
from vitmnist.runtime.files import home_expanded
from vitmnist.runtime.records import refuse_control_characters

WEIGHTS = {"best": "best.pt", "final": "final.safetensors", "last": "last.pt"}


@dataclass(frozen=True)
class InferenceModel:
    """A model in evaluation mode on its device, its input shape `(C, H, W)`, classes, and channel statistics.

    Args:
        draft: the `draft` of `read_picture` with which the training images were read.
    """

    model: nn.Module
    path: Path
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    draft: bool = False

    def normalized(self, split: Split) -> Split:
        """`split` with the channel statistics of the model's training data.

        Raises:
            ConfigError: its images or classes do not fit the model.
        """
        if tuple(split.images.shape[1:]) != self.shape or len(split.classes) != len(self.classes):
            raise ConfigError(
                f"the model takes images {list(self.shape)} of {len(self.classes)} classes, the dataset has "
                f"{list(split.images.shape[1:])} of {len(split.classes)}"
            )
        return replace(split, mean=self.mean, std=self.std)


def model_info(config: Config, train: Split) -> dict[str, Any]:
    """What is needed to use the weights: model, image shape, classes, statistics and draft, as JSON values."""
    shape = list(train.images.shape[1:])
    draft = DATASETS.complete(config.data.dataset).get("draft") is True
    info = {"model": config.model, "shape": shape, "classes": train.classes, "mean": train.mean, "std": train.std}
    as_json: dict[str, Any] = json.loads(json.dumps({**info, "draft": draft}))
    return as_json


def load_inference_model(folder: Path, device: torch.device, weights: str | None = None) -> InferenceModel:
    """Load the model of a run.

    Args:
        folder: of the run.
        weights: best, final or last; None takes the first that exists.

    Raises:
        ConfigError: the folder does not contain these weights.
        DataError: they are damaged, or their model cannot be built.
    """
    path = _weights_file(folder, [weights] if weights else [*WEIGHTS])
    with storage.reporting_damage(path):
        info, tensors = _read(path)
        refuse_control_characters(json.dumps(info))
        shape, classes = tuple(map(int, info["shape"])), tuple(map(str, info["classes"]))
        mean, std = (tuple(map(float, info[key])) for key in ("mean", "std"))
        model = _build(path, info["model"], shape, len(classes))
        model.load_state_dict(tensors)
        _check_finite(tensors)
        return InferenceModel(model.eval().to(device), path, shape, classes, mean, std, info["draft"])


def read_initial_weights(init: str) -> dict[str, torch.Tensor]:
    """The weights and statistics in a `.safetensors` file, or the best, else the final ones of a run's folder.

    Raises:
        ConfigError: there are none.
        DataError: they are damaged.
    """
    path = home_expanded(init)
    if path.is_dir():
        path = _weights_file(path, ["best", "final"])
    elif path.suffix != ".safetensors" or not path.is_file():
        raise ConfigError(f"init={init}: is not a .safetensors file, nor the folder of a run")
    with storage.reporting_damage(path):
        tensors = _read(path)[1] if path.suffix == ".pt" else load_file(path)
        _check_finite(tensors)
        return tensors


def _weights_file(folder: Path, names: Sequence[str]) -> Path:
    """The first of these weights that a run has; raises `ConfigError` if it has none."""
    for name in names:
        if (path := folder / storage.FOLDER / WEIGHTS[name]).is_file():
            return path
    raise ConfigError(f"{folder}: holds no {' or '.join(names)} weights in {storage.FOLDER}/; name the folder of a run")


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError("some weights are not finite")


def _build(path: Path, options: dict[str, Any], shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the model of an undamaged file; raises `DataError` if something is missing that it was trained with."""
    if options["name"] not in (names := MODELS.names()):
        raise DataError(
            f"{path}: its model {options['name']!r} is not registered, only {', '.join(names)}; put the module that "
            "registers it back into vitmnist/models"
        )
    try:
        return MODELS.build(options, shape, classes)
    except (UserError, OSError) as error:  # a file that its options name has moved
        reason = classify(error).message
        raise DataError(f"{path}: its model cannot be built: {reason}; put back what it was trained with") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `model_info` and the weights of a file; the averaged weights if it has any."""
    if path.suffix == ".pt":
        state = storage.read(path)
        return state["model_info"], (state["step"]["ema"] or state["step"])["model"]
    with safe_open(path, framework="pt") as file:
        info = json.loads((file.metadata() or {})["vitmnist"])
        return info, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict, only keys()
