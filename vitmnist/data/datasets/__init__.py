"""The datasets: every module in this folder that registers one is imported here.

To add one, write a module here whose function registers itself and returns a `Dataset`, and its YAML file in
`conf/data/dataset/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitmnist.data.datasets.base import DATASETS, Dataset, Split
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import DataError
from vitmnist.registry import import_members

import_members(__name__, __path__)

__all__ = ["DATASETS", "DEFAULT_ROOT", "Dataset", "Split", "TensorSet", "build_dataset", "load_dataset"]

DEFAULT_ROOT = "~/.cache/vitmnist"


def load_dataset(name: str, *, root: str = DEFAULT_ROOT, **options: Any) -> Dataset:
    """The dataset `name`: its training and test split, uint8 images, labels and channel statistics.

    Args:
        name: mnist, fashion_mnist, kmnist, cifar10, cifar100, image_folder, or your own.
        root: the folder for downloaded and decoded files; `~` is the home folder.
        options: the keys of the set's YAML file in `conf/data/dataset/`, such as `train_size=1000`.

    Raises:
        ConfigError: an unknown name or option, or a size that the set does not have.
        DataError: a file that is missing or damaged.
    """
    return build_dataset(DATASETS.complete({"name": name, **options}), root, key="")


def build_dataset(values: Mapping[str, Any], root: str, key: str | None = None) -> Dataset:
    """The dataset that a configuration chooses by `values["name"]`; raises as `load_dataset`.

    Args:
        key: where `values` are in the configuration, if not at `data.dataset`.
    """
    try:
        return DATASETS.build(values, Path(root).expanduser(), key=key)
    except OSError as error:
        raise DataError(f"data.root={root}: {error.filename or ''}: {error.strerror}") from error
