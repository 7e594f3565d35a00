"""Images and labels in NumPy arrays: an `.npz` file, or a folder of `.npy` files, which are memory-mapped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmnist.config.validation import config_field, section
from vitmnist.data.channel_statistics import PLAUSIBLE_CHANNELS, Statistics, check_statistics
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, make_dataset
from vitmnist.data.sources import CHUNK_SIZE, as_tensor
from vitmnist.errors import ConfigError, DataError, join_names
from vitmnist.runtime.memory import map_private


@dataclass
class ArrayNames:
    """The names of the arrays. Arrays of validation and test images may be missing."""

    images: str = "images"
    labels: str = "labels"
    val_images: str = "val_images"
    val_labels: str = "val_labels"
    test_images: str = "test_images"
    test_labels: str = "test_labels"


@dataclass
class ArraysOptions(SizeOptions):
    """See `conf/data/dataset/arrays.yaml`."""

    path: str = config_field(may_change_on_resume=True)
    names: ArrayNames = section(ArrayNames, may_change_on_resume=True)
    statistics: Statistics | None = None


@DATASETS.register("arrays", ArraysOptions)
def arrays(options: ArraysOptions, root: Path) -> Dataset:
    """Images `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]`, and labels `[N]`: integers or text, which name the classes.

    Raises:
        ConfigError: there is no such file or folder, or a size is larger than its split.
        DataError: an array is missing, damaged or of Python objects, or its values cannot be used.
    """
    path = Path(options.path).expanduser()
    if not path.exists():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such .npz file or folder of .npy files")
    classes: NDArray[Any] = np.empty(0)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for split, prefix in (("train", ""), ("validation", "val_"), ("test", "test_")):
        keys = [getattr(options.names, f"{prefix}{part}") for part in ("images", "labels")]
        images, labels = (_read_array(path, key) for key in keys)
        if images is None and labels is None and split != "train":
            continue
        if images is None or labels is None:
            missing = keys[0] if images is None else keys[1]
            raise DataError(f"{path}: has no array {missing}; set data.dataset.names.{prefix}images and {prefix}labels")
        try:
            classes = np.unique(labels) if split == "train" else classes
            pairs[split] = _to_uint8(images, options.statistics), _to_indices(labels, classes)
        except DataError as error:
            raise DataError(f"{path}: {' and '.join(keys)}: {error}") from error
    is_mapped = path.is_dir() and options.statistics is None
    names, validation = tuple(map(str, classes.tolist())), pairs.get("validation")
    return make_dataset(path.stem, pairs["train"], pairs.get("test"), names, options, validation, is_mapped)


def _read_array(path: Path, name: str) -> NDArray[Any] | None:
    """Read an array of an `.npz` file, or map one of a folder into memory; None if there is none of this name."""
    try:
        if not path.is_dir():
            with np.load(path) as arrays:
                array: NDArray[Any] | None = arrays.get(name)
                return array
        if not (file := path / f"{name}.npy").exists():
            return None
        header = np.load(file, mmap_mode="r")  # A write to this read-only mapping would end the process.
        with file.open("rb") as stream:
            return np.ndarray(header.shape, header.dtype, map_private(stream), header.offset, header.strides)
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile raise errors of many types for damaged files.
        problem = "is damaged, or is no array of numbers or text"
        raise DataError(f"{path}: {name} {problem}; write arrays with numpy.savez or numpy.save") from error


def _to_uint8(array: NDArray[Any], statistics: Statistics | None) -> Tensor:
    """Return images as uint8 `[N, C, H, W]`; floats were normalised with the statistics."""
    images: Tensor = as_tensor("images", array)
    if images.dim() == 3:
        images = images[:, None]
    elif images.dim() == 4:
        axes = [axis for axis in (1, 3) if images.shape[axis] in PLAUSIBLE_CHANNELS]
        if len(axes) != 1:
            raise DataError(f"found {[*images.shape]}; must be [N, C, H, W] or [N, H, W, C] with 1, 3 or 4 channels C")
        images = images.movedim(axes[0], 1)
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        dtype = str(images.dtype).removeprefix("torch.")
        raise DataError(f"must be uint8 or floats, found {dtype}; convert 16 bits with (array / 257).astype('uint8')")
    if statistics is None:
        raise DataError(
            "floats need data.dataset.statistics={mean: [..], std: [..]}, with which they were normalised; "
            "{mean: [0], std: [1]} for values of 0 to 1"
        )
    check_statistics("data.dataset.statistics", statistics.mean, statistics.std)
    if len(statistics.mean) not in (1, images.shape[1]):
        raise DataError(f"data.dataset.statistics has {len(statistics.mean)} channels, the images {images.shape[1]}")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (statistics.mean, statistics.std))
    return torch.cat([_denormalize(chunk, mean, std) for chunk in images.split(CHUNK_SIZE)])


def _denormalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    values = (images * std + mean) * 255
    low, high = values.min() / 255, values.max() / 255
    if not (low >= -1 / 255 and high <= 256 / 255):  # Not a number is refused too.
        raise DataError(f"with data.dataset.statistics, floats become {low:.3g} to {high:.3g}, and must become 0 to 1")
    return values.round().clamp(0, 255).to(torch.uint8)


def _to_indices(labels: NDArray[Any], classes: NDArray[Any]) -> Tensor:
    """Return the index of the class of each label, int64 `[N]`."""
    labels = labels[:, 0] if labels.shape[1:] == (1,) else labels
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iuU":
        raise DataError(f"labels must be integers or text [N], N > 0, found {labels.dtype} {[*labels.shape]}")
    if len(unknown := np.setdiff1d(labels, classes)):
        raise DataError(f"classes without training images: {join_names(unknown.tolist())}")
    return torch.from_numpy(np.searchsorted(classes, labels))
