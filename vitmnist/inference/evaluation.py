"""The evaluation of a trained model: its configuration, its dataset and its results."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.config import parse_key
from vitmnist.config.schema import flatten_keys, is_under, iterate_metadata
from vitmnist.data.datasets.base import DATASETS, Dataset, Split, build_dataset
from vitmnist.data.hold_out import hold_out_and_normalize
from vitmnist.errors import ConfigError
from vitmnist.tracking.recorded_config import load_recorded_config
from vitmnist.tracking.runs import read_run
from vitmnist.training.loop import Predictions

IMAGE_KEYS = ("data.root", "data.dataset", "data.holdout", "data.holdout_seed", "data.folds", "data.fold", "batch_size")
"""The keys and sections that select the evaluated images. Other keys have the values of the run."""
UNDIVIDED = {
    "data.holdout": None,
    "data.folds": None,
    "data.fold": None,
    "data.dataset.train_size": None,
    "data.dataset.test_size": None,
    "data.dataset.test_share": 0,
}
"""The keys that divide or limit a dataset, with the values for which all images are used."""
DIVIDING = ("data.holdout", "data.folds", "data.fold", "data.dataset.test_share", "data.holdout_seed")
"""The keys that divide a dataset into splits."""


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


def load_evaluation_dataset(folder: Path, overrides: Sequence[str]) -> tuple[Dataset, int]:
    """Build the dataset of an evaluation, and warn if images of the run have changed since training.

    Args:
        folder: the folder of the run.
        overrides: changes to its configuration.

    Returns:
        The dataset, and the batch size.

    Raises:
        ConfigError: an override cannot be used, or for images at another path, it is unclear whether to divide and
            limit them as in training.
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    keys = {override: parse_key(override).replace("/", ".") for override in overrides}
    for override, key in keys.items():
        if not is_under(key, IMAGE_KEYS):
            allowed = ", ".join(IMAGE_KEYS)
            raise ConfigError(f"{override}: has no effect on a trained model; only {allowed} can be changed")
    config = load_recorded_config(folder, [*overrides])
    data = config.data
    trained_config = load_recorded_config(folder, [])
    trained_data = trained_config.data
    _, options = DATASETS.resolve(data.dataset)
    # The options that are marked as allowed to change on resuming locate the images.
    locating = [key for key, metadata in iterate_metadata(type(options)) if metadata.may_change]
    values, trained_values = (flatten_keys({"data": vars(each)}) for each in (data, trained_data))
    divided = [key for key in UNDIVIDED if values.get(key) not in (None, UNDIVIDED[key])]
    if _get_location(data.dataset, locating) != _get_location(trained_data.dataset, locating):
        if unclear := [key for key in divided if key not in keys.values()]:
            undivided = " ".join(f"{key}={'null' if UNDIVIDED[key] is None else 0}" for key in unclear)
            as_trained = " ".join(f"{key}={values[key]}" for key in unclear)
            raise ConfigError(
                f"the run was trained on images at another path; set {undivided} to evaluate all of these images, or "
                f"{as_trained} to divide and limit them as in training"
            )
    elif any(key in divided for key in DIVIDING) and any(
        values.get(key) != trained_values.get(key) for key in (*DIVIDING, "data.dataset.train_size")
    ):
        print("warning: the run divided its images differently; it may have seen images of this split", file=sys.stderr)
    dataset = hold_out_and_normalize(build_dataset(data.dataset, data.root), data)
    trained_paths = {key: trained_data.dataset[key] for key in locating if key in trained_data.dataset}
    is_trained_data = replace(data, root=trained_data.root, dataset=data.dataset | trained_paths) == trained_data
    if is_trained_data and not trained_config.limit_batches:
        recorded = (read_run(folder).result.dataset or {}).get("sha256") or {}
        for name in dataset.splits:
            checksum = dataset.sha256[f"{name}_images"]
            if recorded.get(f"{name}_images", checksum) != checksum:
                print(f"warning: the images of the {name} split have changed since training", file=sys.stderr)
    return dataset, config.batch_size


def _get_location(dataset: Mapping[str, Any], locating: Collection[str]) -> list[object]:
    """Return the name of a dataset, and the values of the options that locate its images, resolved as paths."""
    return [dataset["name"], *(Path(str(dataset.get(key))).expanduser().resolve() for key in locating)]
