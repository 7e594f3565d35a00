"""The evaluation of a trained model: its configuration, its dataset and its results."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.config import is_under, parse_key
from vitmnist.config.schema import Config, DataConfig, flatten_keys, iterate_metadata
from vitmnist.config.validation import KeyMetadata
from vitmnist.data.datasets.base import DATASETS, Dataset, Split, build_dataset
from vitmnist.data.hold_out import hold_out_and_normalize
from vitmnist.errors import ConfigError
from vitmnist.tracking.resume import load_recorded_config
from vitmnist.tracking.runs import read_run
from vitmnist.training.loop import Predictions

SELECTING_KEYS = [key for key, metadata in iterate_metadata(DataConfig, "data") if metadata.image_selection]
CHANGEABLE_KEYS = ("data.root", "data.dataset", *SELECTING_KEYS, "batch_size", "metrics")
"""The keys and sections that an evaluation can change. Other keys have the values of the run."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The predictions of a model on a split, and its metrics by name.

    Args:
        split_name: train, validation or test; all, if the dataset has one split.
        split: the evaluated images; their labels are the model's.
        metrics: the values of the metrics that the run selects, such as `acc` in percent.
    """

    weights: Path
    split_name: str
    split: Split
    predictions: Predictions
    metrics: dict[str, float]

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"Evaluation({self.split_name} split, {len(self.split):,} images, {metrics})"

    @property
    def accuracy(self) -> float:
        """The share of correct predictions in percent."""
        return 100 * int((self.predictions.predicted == self.predictions.labels).sum()) / len(self.split)

    @property
    def confusion_matrix(self) -> Tensor:
        """The number of images by true class (rows) and predicted class (columns): int64 `[classes, classes]`, CPU."""
        return self.predictions.confusion_matrix()

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
    selecting = {key: metadata for key, metadata in _iterate_data_metadata(config.data) if metadata.image_selection}
    values, trained_values = (flatten_keys({"data": vars(each.data)}) for each in (config, trained))
    active = [
        key
        for key, each in selecting.items()
        if each.image_selection != "seed" and values[key] not in (None, each.keeps_all)
    ]
    if _separate_location(config.data)[0] != _separate_location(trained.data)[0]:
        if unclear := [key for key in active if key not in keys.values()]:
            keeps_all = {key: selecting[key].keeps_all for key in unclear}
            all_images = " ".join(f"{key}={'null' if value is None else value}" for key, value in keeps_all.items())
            as_trained = " ".join(f"{key}={values[key]}" for key in unclear)
            raise ConfigError(
                f"the run was trained on images at another path; set {all_images} to evaluate all of these images, or "
                f"{as_trained} to divide and limit them as in training"
            )
    elif any(selecting[key].image_selection == "splits" for key in active) and any(
        values.get(key) != trained_values.get(key) for key in selecting if selecting[key].image_selection != "test"
    ):
        print("warning: the run divided its images differently; it may have seen images of this split", file=sys.stderr)
    return config


def load_evaluation_dataset(folder: Path, config: Config) -> Dataset:
    """Build the dataset of an evaluation, and warn if images of the run in `folder` have changed since training."""
    dataset = hold_out_and_normalize(build_dataset(config.data.dataset, config.data.root), config.data)
    trained = load_recorded_config(folder, [])
    if trained.limit_batches or _separate_location(config.data)[1] != _separate_location(trained.data)[1]:
        return dataset  # The run was trained on a part of these images, or on others.
    recorded = (read_run(folder).result.dataset or {}).get("sha256") or {}
    for name in dataset.splits:
        checksum = dataset.sha256[f"{name}_images"]
        if recorded.get(f"{name}_images", checksum) != checksum:
            print(f"warning: the images of the {name} split have changed since training", file=sys.stderr)
    return dataset


def _iterate_data_metadata(data: DataConfig) -> Iterator[tuple[str, KeyMetadata]]:
    """Yield the keys of the section `data` and of the options of its dataset, with their metadata."""
    _, options = DATASETS.resolve(data.dataset)
    yield from iterate_metadata(DataConfig, "data")
    yield from iterate_metadata(type(options), "data.dataset")


def _separate_location(data: DataConfig) -> tuple[dict[str, Path], dict[str, Any]]:
    """Return the name and the location of the images, as paths, and the other values but the root, by key."""
    values = flatten_keys({"data": vars(data)})
    locating = [key for key, metadata in _iterate_data_metadata(data) if metadata.may_change_on_resume]
    location = {key: value for key, value in values.items() if is_under(key, ["data.dataset.name", *locating])}
    others = {key: value for key, value in values.items() if not is_under(key, ["data.root", *locating])}
    return {key: Path(str(value)).expanduser().resolve() for key, value in location.items()}, others
