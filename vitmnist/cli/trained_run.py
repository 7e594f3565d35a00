"""The run that `evaluate`, `predict` and `export` use: its arguments, its configuration and its dataset."""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitmnist.checkpoint.storage import WEIGHT_FILES
from vitmnist.config import parse_key
from vitmnist.config.schema import Config, DataConfig, dotted_keys, is_under
from vitmnist.data.datasets.base import Dataset, apply_config, build_dataset
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import expand_home
from vitmnist.tracking.recorded_config import load_recorded_config
from vitmnist.tracking.runs import read_run

# The keys and sections that select the evaluated images. Other keys keep the values of the run.
IMAGE_KEYS = ("data.root", "data.dataset", "data.holdout", "data.holdout_seed", "batch_size")
# The options of a dataset that locate its images and labels.
PATHS = ("path", "labels")
# The keys that divide or limit a dataset, with the values that keep all images.
UNDIVIDED = {
    "data.holdout": "null",
    "data.dataset.train_size": "null",
    "data.dataset.test_size": "null",
    "data.dataset.test_share": "0",
}


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `evaluate`, `predict` and `export` share."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--weights", choices=[*WEIGHT_FILES], help="default: the first of these that exists")


def add_dataset_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `evaluate` and `export` share."""
    add_run_arguments(parser)
    parser.add_argument(
        "overrides", nargs="*", help="changes to the run's configuration, such as data.dataset.path=other"
    )


def load_evaluation_config(folder: Path, overrides: list[str], overridable: Sequence[str]) -> Config:
    """Load the recorded configuration of a run, and apply overrides.

    Raises:
        ConfigError: a key is not overridable, or the folder or the overrides cannot be used.
    """
    for override in overrides:
        if not is_under(_dotted_key(override), overridable):
            allowed = ", ".join(overridable)
            raise ConfigError(f"{override}: has no effect on a trained model; only {allowed} can be changed")
    return load_recorded_config(folder, overrides)


def _dotted_key(override: str) -> str:
    return parse_key(override).replace("/", ".")


def load_evaluation_dataset(folder: Path, data: DataConfig, overrides: list[str]) -> Dataset:
    """Build the dataset of an evaluation, and warn if images of the run have changed since training.

    Raises:
        ConfigError: for images at another path, it is unclear whether to divide and limit them as in training.
    """
    trained_data = load_recorded_config(folder, []).data
    if _resolve_paths(data.dataset) != _resolve_paths(trained_data.dataset):
        values = dotted_keys({"data": vars(data)})
        typed = {_dotted_key(override) for override in overrides}
        if unclear := [key for key in UNDIVIDED if values.get(key) and key not in typed]:
            undivided = " ".join(f"{key}={UNDIVIDED[key]}" for key in unclear)
            as_trained = " ".join(f"{key}={values[key]}" for key in unclear)
            raise ConfigError(
                f"the run was trained on images at another path; type {undivided} to evaluate all of these images, or "
                f"{as_trained} to divide and limit them as in training"
            )
    dataset = apply_config(build_dataset(data.dataset, data.root), data)
    trained_paths = {key: trained_data.dataset[key] for key in PATHS if key in trained_data.dataset}
    if replace(data, root=trained_data.root, dataset=data.dataset | trained_paths) == trained_data:
        recorded = (read_run(folder).result.dataset or {}).get("sha256") or {}
        for name in dataset.splits:
            checksum = dataset.sha256[f"{name}_images"]
            if recorded.get(f"{name}_images", checksum) != checksum:
                print(f"warning: the images of the {name} split have changed since training", file=sys.stderr)
    return dataset


def _resolve_paths(options: Mapping[str, Any]) -> list[object]:
    """Return the name of a dataset, and the resolved paths of its images and labels."""
    return [options["name"], *(expand_home(str(options.get(key))).resolve() for key in PATHS)]
