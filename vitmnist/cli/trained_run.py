"""The run that `evaluate`, `predict` and `export` use: its arguments, its configuration and its dataset."""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitmnist.checkpoint.storage import WEIGHT_FILES
from vitmnist.cli.arguments import parse_key
from vitmnist.cli.resume import load_recorded_config
from vitmnist.config.schema import Config, DataConfig, is_under
from vitmnist.data.datasets.base import Dataset, apply_config, build_dataset
from vitmnist.errors import ConfigError, UserError
from vitmnist.runtime.files import expand_home
from vitmnist.tracking.runs import read_run

# The keys and sections that choose the evaluated images. All other values are those of the run.
IMAGE_KEYS = ("data.root", "data.dataset", "data.holdout", "data.holdout_seed", "batch_size")
# The options of a dataset that say where its images and labels are.
PATHS = ("path", "labels")
# The options that limit or divide a dataset, with the values that leave all images in one split.
UNLIMITED = {"test_share": 0.0, "train_size": None, "test_size": None}


def add_run_arguments(parser: ArgumentParser) -> None:
    """The arguments that `evaluate`, `predict` and `export` share."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--weights", choices=[*WEIGHT_FILES], help="default: the first of these that exists")


def load_evaluation_config(folder: Path, overrides: list[str], overridable: Sequence[str]) -> Config:
    """The recorded configuration of a run, changed by overrides.

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
    """The dataset of an evaluation; warns if images of the run have changed since training.

    All images of another dataset are evaluated, unless overrides limit or divide it.
    """
    trained_data = load_recorded_config(folder, []).data
    record = read_run(folder).result.dataset or {}
    if _resolve_paths(data.dataset) == _resolve_paths(trained_data.dataset):
        # The texts can differ, such as `images` and `./images`.
        paths = {key: trained_data.dataset[key] for key in PATHS if key in trained_data.dataset}
        data = replace(data, dataset=data.dataset | paths)
    elif not _has_moved(data, trained_data, record):
        keys = [_dotted_key(override) for override in overrides]
        holdout = data.holdout if "data.holdout" in keys else None
        limits = [key for key in UNLIMITED if key in data.dataset and f"data.dataset.{key}" not in keys]
        data = replace(data, holdout=holdout, dataset=data.dataset | {key: UNLIMITED[key] for key in limits})
    dataset = apply_config(build_dataset(data.dataset, data.root), data)
    if replace(data, root="") == replace(trained_data, root=""):
        recorded = record.get("sha256") or {}
        for name in dataset.splits:
            checksum = dataset.sha256[f"{name}_images"]
            if recorded.get(f"{name}_images", checksum) != checksum:
                print(f"warning: the images of the {name} split have changed since training", file=sys.stderr)
    return dataset


def _resolve_paths(options: Mapping[str, Any]) -> list[object]:
    """The name of a dataset, and the absolute paths of its images and labels, without links."""
    return [options["name"], *(expand_home(str(options.get(key))).resolve() for key in PATHS)]


def _has_moved(data: DataConfig, trained_data: DataConfig, record: Mapping[str, Any]) -> bool:
    """Whether the images of a run are now at other paths: divided as in training, they have the recorded checksums.

    Args:
        record: the section `dataset` of the run's `result.json`.
    """
    if data.dataset["name"] != trained_data.dataset["name"]:
        return False
    place = {key: data.dataset[key] for key in (*PATHS, "columns", "suffix") if key in data.dataset}
    options = trained_data.dataset | place
    try:
        if options.get("train_size") is None and options.get("test_size") is None:
            # Count first, so that another dataset is decoded only once, in the splits that are evaluated.
            whole = {key: UNLIMITED.get(key, value) for key, value in options.items()}
            splits = build_dataset(whole, data.root).splits.values()
            sizes = [size for key, size in record.items() if key.endswith("_size") and isinstance(size, int)]
            if sum(map(len, splits)) != sum(sizes):
                return False
        return apply_config(build_dataset(options, data.root), trained_data).sha256 == record.get("sha256")
    except UserError:
        # For example, another dataset has too few images for the hold-out of the run.
        return False
