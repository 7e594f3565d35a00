"""Loads a trained model with everything needed to use it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitmnist.augment.preprocess import Preprocess, build_augment, get_input_size
from vitmnist.checkpoint.storage import WEIGHT_FILES, as_damaged_error, find_weights_file, read_weights_file
from vitmnist.config.schema import Config, keys_where, may_change
from vitmnist.data.datasets.base import FileReader, Split, get_file_reader
from vitmnist.errors import ConfigError, join_names
from vitmnist.models import MODELS


@dataclass(frozen=True)
class InferenceModel:
    """A trained model in evaluation mode on its device, with everything needed to use it.

    Args:
        image_shape: `(C, H, W)` of the images.
        mean, std: the statistics of each channel, to normalise images.
        input_size: height and width of the centre crop that the model sees.
        dataset: the options of the dataset, without the options that may change on resuming.
    """

    model: nn.Module
    path: Path
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: tuple[int, ...]
    dataset: Mapping[str, Any]

    def build_preprocess(self) -> Preprocess:
        """Return the transform that crops and normalises images for the model, on the CPU."""
        return Preprocess(mean=self.mean, std=self.std, size=self.input_size)

    def build_reader(self) -> FileReader:
        """Return the function that reads a file into an image; raises `ConfigError` if the dataset is unknown."""
        return get_file_reader(self.dataset, self.image_shape)

    def adapt_split(self, split: Split) -> Split:
        """Return the split with the channel statistics and the class indices of the model.

        Raises:
            ConfigError: the split has no images, or its images or classes do not fit the model.
        """
        if not len(split):
            raise ConfigError("the split to evaluate has no images")
        shape, classes = tuple(split.images.shape[1:]), self.classes
        if shape != self.image_shape:
            raise ConfigError(f"the model takes images {list(self.image_shape)}, the dataset has {list(shape)}")
        if unknown := [name for name in split.classes if name not in classes]:
            raise ConfigError(
                f"the dataset has classes that the model does not know: {join_names(unknown)}; "
                f"it knows {join_names(classes)}"
            )
        labels = torch.tensor([classes.index(name) for name in split.classes])[split.labels]
        return replace(split, labels=labels, classes=classes, mean=self.mean, std=self.std)


def make_model_info(config: Config, train: Split) -> dict[str, Any]:
    """Return the metadata of the weights, plain values: how to build the model, and how to read files for it."""
    mutable = keys_where(may_change, asdict(config))
    return {
        "model": config.model,
        "shape": tuple(train.images.shape[1:]),
        "classes": train.classes,
        "mean": train.mean,
        "std": train.std,
        "size": get_input_size(build_augment(config.data.augment), *train.images.shape[2:]),
        "dataset": {key: value for key, value in config.data.dataset.items() if f"data.dataset.{key}" not in mutable},
    }


def load_inference_model(folder: Path, device: torch.device, weights: str | None = None) -> InferenceModel:
    """Load the model of a run.

    Args:
        weights: best, final or last; None: the first kind that exists.

    Raises:
        ConfigError: the folder does not contain these weights, or their model cannot be built.
        DataError: the weights are damaged.
    """
    path = find_weights_file(folder, [weights] if weights else [*WEIGHT_FILES])
    with as_damaged_error(path):
        info, tensors = read_weights_file(path)
        shape, classes = tuple(map(int, info["shape"])), tuple(map(str, info["classes"]))
        mean, std = (tuple(map(float, info[key])) for key in ("mean", "std"))
        size, dataset = tuple(map(int, info["size"])), dict(info["dataset"])
    model = MODELS.build(MODELS.with_defaults(info["model"]), (shape[0], *size), len(classes))
    with as_damaged_error(path):
        model.load_state_dict(tensors)
    return InferenceModel(model.eval().to(device), path, shape, classes, mean, std, size, dataset)
