"""The evaluation of a trained model: its configuration, its dataset and its results."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.config import parse_key
from vitmnist.config.schema import Config, DataConfig, flatten_keys, is_under, iterate_metadata
from vitmnist.config.validation import KeyMetadata
from vitmnist.data.datasets.base import DATASETS, Dataset, Split, build_dataset
from vitmnist.data.hold_out import hold_out_and_normalize
from vitmnist.errors import ConfigError
from vitmnist.tracking.resume import load_recorded_config
from vitmnist.tracking.runs import read_run
from vitmnist.training.loop import Predictions

SELECTING_KEYS = [key for key, metadata in iterate_metadata(DataConfig, "data") if metadata.selects]
CHANGEABLE_KEYS = ("data.root", "data.dataset", *SELECTING_KEYS, "batch_size")
"""The keys and sections that an evaluation can change. Other keys have the values of the run."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The predictions of a model on a split, and the registered metrics by name.

    Args:
        split_name: train, validation or test; all, if the dataset has one split.
        split: the evaluated images; their labels are the model's.
        metrics: the values of the registered metrics, such as `acc` in percent.
    """

    weights: Path
    split_name: str
    split: Split
    predictions: Predictions
    metrics: dict[str, float]

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in [*self.metrics.items()][:4])
        return f"Evaluation({self.split_name} split, {len(self.split):,} images, {metrics})"

    @property
    def accuracy(self) -> float:
        """The share of correct predictions in percent."""
        return self.metrics["acc"]

    @property
    def confusion_matrix(self) -> Tensor:
        """The number of images by true class (rows) and predicted class (columns): int64 `[classes, classes]`, CPU."""
        return self.predictions.confusion_matrix(len(self.split.classes))

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row per image: file name or index, true class, predicted class and its probability."""
        predicted, probabilities = self.predictions.predicted.tolist(), self.predictions.confidence.tolist()
        actual, classes = self.split.labels.tolist(), self.split.classes
        return [
            {
                "image": self.split.sample_name(index),
                "true_class": classes[actual[index]],
                "predicted_class": classes[predicted[index]],
                "probability": probabilities[index],
            }
            for index in indices
        ]


def load_evaluation_config(folder: Path, overrides: Sequence[str]) -> Config:
    """Load the configuration of the run in `folder`, changed by overrides; warn about a division that differs.

    Raises:
        ConfigError: an override cannot be used, or for images at another path, it is unclear whether to divide and
            limit them as in training.
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    keys = {override: parse_key(override).replace("/", ".") for override in overrides}
    for override, key in keys.items():
        if not is_under(key, CHANGEABLE_KEYS):
            allowed = ", ".join(CHANGEABLE_KEYS)
            raise ConfigError(f"{override}: has no effect on a trained model; only {allowed} can be changed")
    config, trained = load_recorded_config(folder, [*overrides]), load_recorded_config(folder, [])
    selecting = _find_selecting_keys(config.data)
    values, trained_values = (flatten_keys({"data": vars(each.data)}) for each in (config, trained))
    active = [
        key for key, each in selecting.items() if each.selects != "seed" and values[key] not in (None, each.neutral)
    ]
    if _find_location(config.data) != _find_location(trained.data):
        if unclear := [key for key in active if key not in keys.values()]:
            neutral = {key: selecting[key].neutral for key in unclear}
            all_images = " ".join(f"{key}={'null' if value is None else value}" for key, value in neutral.items())
            as_trained = " ".join(f"{key}={values[key]}" for key in unclear)
            raise ConfigError(
                f"the run was trained on images at another path; set {all_images} to evaluate all of these images, or "
                f"{as_trained} to divide and limit them as in training"
            )
    elif any(selecting[key].selects == "splits" for key in active) and any(
        values.get(key) != trained_values.get(key) for key in selecting if selecting[key].selects != "test"
    ):
        print("warning: the run divided its images differently; it may have seen images of this split", file=sys.stderr)
    return config


def load_evaluation_dataset(folder: Path, config: Config) -> Dataset:
    """Build the dataset of an evaluation, and warn if images of the run in `folder` have changed since training."""
    dataset = hold_out_and_normalize(build_dataset(config.data.dataset, config.data.root), config.data)
    trained = load_recorded_config(folder, [])
    if trained.limit_batches or _without_location(config.data) != _without_location(trained.data):
        return dataset  # The run was trained on a part of these images, or on others.
    recorded = (read_run(folder).result.dataset or {}).get("sha256") or {}
    for name in dataset.splits:
        checksum = dataset.sha256[f"{name}_images"]
        if recorded.get(f"{name}_images", checksum) != checksum:
            print(f"warning: the images of the {name} split have changed since training", file=sys.stderr)
    return dataset


def _find_selecting_keys(data: DataConfig) -> dict[str, KeyMetadata]:
    """Return the keys that divide or limit the images of a dataset, with their metadata."""
    _, options = DATASETS.resolve(data.dataset)
    keys = [*iterate_metadata(DataConfig, "data"), *iterate_metadata(type(options), "data.dataset")]
    return {key: metadata for key, metadata in keys if metadata.selects}


def _locating_options(data: DataConfig) -> list[str]:
    """The options that locate the images of the dataset: they are marked as allowed to change on resuming."""
    _, options = DATASETS.resolve(data.dataset)
    return [name for name, metadata in iterate_metadata(type(options)) if metadata.may_change]


def _find_location(data: DataConfig) -> list[object]:
    """Return the name of a dataset, and the values of the options that locate its images, resolved as paths."""
    options = data.dataset
    return [options["name"], *(Path(str(options.get(key))).expanduser().resolve() for key in _locating_options(data))]


def _without_location(data: DataConfig) -> DataConfig:
    """Return the configuration of the data without the root and the options that locate the images."""
    locating = _locating_options(data)
    return replace(data, root="", dataset={key: value for key, value in data.dataset.items() if key not in locating})
