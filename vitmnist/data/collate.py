"""Batches from the samples of a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.data.images import to_tensor
from vitmnist.store.tree import tree_map


def collate_samples(samples: Sequence[Any]) -> Any:
    """A batch of samples as torch's `default_collate` makes it; PIL images become uint8 `[B, C, H, W]`, None stays.

    Like torch, it turns nested tuples into lists; a sample that is a tuple itself makes a tuple.

    Raises:
        TypeError: samples that torch cannot batch.
        RuntimeError: tensors of different shapes.
    """
    # Private, and used by this function alone: how `default_collate` is extended, as its documentation shows.
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    ours: dict[Any, Callable[..., Any]] = {Image.Image: _collate_images, type(None): _collate_none}
    batch = collate(samples, collate_fn_map={**default_collate_fn_map, **ours})
    return tuple(batch) if isinstance(batch, list) and isinstance(samples[0], tuple) else batch


def _collate_images(images: Sequence[Image.Image], *, collate_fn_map: object = None) -> Tensor:
    return torch.stack([to_tensor(image) for image in images])


def _collate_none(values: Sequence[Any], *, collate_fn_map: object = None) -> None:
    if any(value is not None for value in values):
        raise TypeError("some samples have None where others have a value; give them all one or none of them")


def copied(samples: Any) -> Any:
    """Copies for a function that may change them: new dicts, lists and tuples with copies of what they contain."""

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            # Not deepcopy, which copies the whole storage of a view.
            return value if value.requires_grad else value.clone()
        try:
            return copy(value)
        except Exception:  # any method of an object may fail
            return value

    return tree_map(copy_of, samples)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` applied to each tensor in its dicts, lists and tuples; anything else is kept."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        parts = {key: map_tensors(function, value) for key, value in batch.items()}
        if isinstance(batch, MutableMapping) and type(batch) is not dict:
            mapped = copy(batch)  # keeps its type, as torch's pin_memory does
            mapped.update(parts)
            return mapped
        return parts
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # a namedtuple has fields
    return batch
