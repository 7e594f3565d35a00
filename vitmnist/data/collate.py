"""From the samples of a map-style data set to batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torchvision.transforms.functional import pil_to_tensor


def collate_samples(samples: Sequence[Any]) -> Any:
    """A batch of samples as torch's `default_collate` makes it; PIL images become uint8 `[B, C, H, W]`, None stays.

    Raises:
        TypeError: samples that torch cannot batch.
        RuntimeError: tensors of different shapes.
    """
    return _formed(samples[0], collate(samples, collate_fn_map=_COLLATE))


def _formed(sample: Any, batch: Any) -> Any:
    """The batch nested as a sample is: torch turns tuples into lists."""
    formed: Any = batch
    if isinstance(sample, Mapping) and isinstance(batch, Mapping):
        formed = {key: _formed(sample[key], value) for key, value in batch.items()}
    elif isinstance(sample, (tuple, list)) and isinstance(batch, (tuple, list)) and not hasattr(sample, "_fields"):
        formed = [_formed(inner, value) for inner, value in zip(sample, batch, strict=True)]
    else:
        return batch
    try:
        return type(sample)(formed)
    except TypeError:  # a torch.Size holds no tensors, a defaultdict wants a factory
        return tuple(formed) if isinstance(sample, tuple) else formed


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
