"""From the samples of a map-style data set to batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torchvision.transforms.functional import pil_to_tensor

from vitmnist.data.arrays import Arrays
from vitmnist.errors import DataError


def collate_samples(samples: Sequence[Any]) -> Any:
    """A batch of samples as torch's `default_collate` makes it; PIL images become uint8 `[B, C, H, W]`, None stays.

    Raises:
        TypeError: samples that torch cannot batch.
        RuntimeError: tensors of different shapes.
    """
    return _formed(samples[0], collate(samples, collate_fn_map=_COLLATE))


def _formed(sample: Any, batch: Any) -> Any:
    """The batch nested as a sample is: torch turns tuples into lists."""
    if isinstance(sample, Mapping) and isinstance(batch, Mapping):
        return type(batch)({key: _formed(sample[key], value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(sample, (tuple, list)) and isinstance(batch, (tuple, list)) and not hasattr(sample, "_fields"):
        return type(sample)(_formed(inner, value) for inner, value in zip(sample, batch, strict=True))
    return batch


def _collate_pictures(pictures: Sequence[Image.Image], *, collate_fn_map: object = None) -> Tensor:
    return torch.stack([pil_to_tensor(picture) for picture in pictures])


def _collate_none(nothing: Sequence[Any], *, collate_fn_map: object = None) -> None:
    if any(value is not None for value in nothing):
        raise TypeError("some samples have None where others have a value; give them all one or none of them")


_COLLATE: dict[type | tuple[type, ...], Callable[..., Any]] = {
    **default_collate_fn_map,
    Image.Image: _collate_pictures,
    type(None): _collate_none,
}


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` applied to each tensor in it; dicts, lists and tuples are entered, all else passes."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a namedtuple takes its fields one by one
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def pairs(dataset: Dataset[Any], size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples of a map-style data set of pairs (image, label), `size` of them at a time: `[B, …]` and `[B, …]`.

    Raises:
        DataError: samples that are no such pairs, or that differ in their shapes.
    """
    count = len(dataset)  # type: ignore[arg-type]
    for start in range(0, count, size):
        samples = [dataset[index] for index in range(start, min(start + size, count))]
        try:
            batch = collate_samples(samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(f"samples {start} to {start + len(samples) - 1} do not make a batch: {error}") from error
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(a, Tensor) for a in batch)):
            raise DataError(
                f"sample {start} is no pair of an image and a label, but {_outline(samples[0])}; "
                "such samples are delivered by disk, and by prefetch of disk"
            )
        yield batch[0], batch[1]


def load_samples(dataset: Dataset[Any]) -> Arrays:
    """All samples of a map-style data set of pairs (image, label), in memory.

    Raises:
        DataError: as `pairs`, or there is no sample.
    """
    count = len(dataset)  # type: ignore[arg-type]
    arrays: tuple[Tensor, ...] = ()
    filled = 0
    for chunk in pairs(dataset):
        arrays = arrays or tuple(array.new_empty((count, *array.shape[1:])) for array in chunk)
        for whole, array in zip(arrays, chunk, strict=True):
            if (whole.shape[1:], whole.dtype) != (array.shape[1:], array.dtype):
                raise DataError(
                    f"samples from {filled} on are {array.dtype} {list(array.shape[1:])}, "
                    f"those before {whole.dtype} {list(whole.shape[1:])}"
                )
            whole[filled : filled + len(array)] = array
        filled += len(chunk[0])
    if not arrays:
        raise DataError("the data set is empty")
    return Arrays(*arrays)


def size_of_samples(dataset: Dataset[Any]) -> int:
    """The bytes that `load_samples` takes, judged by the first sample."""
    first = next(iter(pairs(dataset, size=1)), ())
    return sum(array.nbytes for array in first) * len(dataset)  # type: ignore[arg-type]


def _outline(sample: Any) -> str:
    if isinstance(sample, (tuple, list)):
        return f"a {type(sample).__name__} of {', '.join(type(value).__name__ for value in sample)}"
    return f"a {type(sample).__name__}"
