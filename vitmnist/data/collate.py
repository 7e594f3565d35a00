"""Batches of samples, as torch's `default_collate` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.data.images import to_tensor


def collate_samples(samples: Sequence[object]) -> object:
    """A batch of samples as torch's `default_collate` makes it; PIL images become uint8 `[B, C, H, W]`, None stays.

    Like torch, it turns nested tuples into lists; a sample that is a tuple itself makes a tuple.

    Raises:
        TypeError: samples that torch cannot batch.
        RuntimeError: tensors of different shapes.
    """
    batch = collate_with({Image.Image: _collate_images, type(None): _collate_none}, samples)
    return tuple(batch) if isinstance(batch, list) and isinstance(samples[0], tuple) else batch


def collate_with(functions: dict[Any, Callable[..., object]], samples: Sequence[object]) -> object:
    """A batch as torch's `default_collate` makes it, with other functions for the values of some types."""
    # Private, and used by this function alone: how `default_collate` is extended, as its documentation shows.
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    return collate(samples, collate_fn_map={**default_collate_fn_map, **functions})


def _collate_images(images: Sequence[Image.Image], *, collate_fn_map: object = None) -> Tensor:
    return torch.stack([to_tensor(image) for image in images])


def _collate_none(values: Sequence[Any], *, collate_fn_map: object = None) -> None:
    if any(value is not None for value in values):
        raise TypeError("some samples have None where others have a value; give them all one or none of them")
