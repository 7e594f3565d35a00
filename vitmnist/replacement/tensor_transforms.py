"""Transforms of PIL images as transforms of uint8 tensors, and a check that both do the same apart from rounding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.data.images import to_tensor
from vitmnist.data.randomness import preserved_random_state, seed_generators
from vitmnist.errors import ConfigError, DataError, error_context
from vitmnist.replacement.split_transforms import Transform, apply_transforms
from vitmnist.store.samples import Samples

TOLERANCE = 8
"""Largest accepted difference from PIL's pixels, in steps of 1/255. Resizing rounds by up to 5."""
V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2."
SAME_DRAWS_IN_V2 = (
    "RandomResizedCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "ColorJitter",
    "RandomErasing",
    "RandomRotation",
)
"""Random transforms that draw the same numbers in v1 and v2 of torchvision."""
CONVERTING = ("ToTensor", "PILToTensor", "ToImage")
"""Transforms that make a tensor of a PIL image."""


@dataclass(frozen=True)
class ToFloat:
    """`ToTensor` for an image that is a uint8 tensor already."""

    def __call__(self, image: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(image, 255, out=out)


@dataclass(frozen=True)
class Normalize:
    """`Normalize` whose result may be written into a row of a batch; `mean` and `std` are `[C, 1, 1]`."""

    mean: Tensor
    std: Tensor

    def __call__(self, image: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sub(image, self.mean.to(image.dtype), out=out).div_(self.std.to(image.dtype))


def tensor_transforms(transforms: Sequence[Transform]) -> list[Transform]:
    """The same transforms for uint8 tensors `[C, H, W]`, with their attributes of this moment.

    Transforms of v1 become those of v2, which are faster on bytes, where both draw the same numbers.
    """
    return [converted for transform in transforms for converted in _tensor_transform(transform)]


def _tensor_transform(transform: Any) -> list[Transform]:
    name = torchvision_name(transform)
    if name == "PILToTensor":
        return []
    if name == "ToTensor":
        return [ToFloat()]
    if name == "Normalize":
        mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
        return [Normalize(mean, std)]
    if type(transform).__module__ != V1:
        return [transform]
    if name in ("Resize", *SAME_DRAWS_IN_V2):
        return [_as_v2(transform)]
    return _separate_padding(transform) if name == "RandomCrop" and transform.padding is not None else [transform]


def _as_v2(transform: Transform) -> Transform:
    from torchvision.transforms import v2

    cls = getattr(v2, type(transform).__name__)
    return cls(**{name: getattr(transform, name) for name in _parameters(cls)})  # type: ignore[no-any-return]


def _separate_padding(crop: Any) -> list[Transform]:
    """A `RandomCrop` of v1 in two steps: padding, and a crop without padding."""
    from torchvision.transforms import v2

    unpadded = copy(crop)
    unpadded.padding = None
    return [v2.Pad(crop.padding, crop.fill, crop.padding_mode), unpadded]


@lru_cache
def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)


def torchvision_name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module, or ""; a user's of the same name may do something else."""
    cls = type(transform)
    return cls.__name__ if cls.__module__.startswith((V1, V2, __name__)) else ""


def check_rounding(
    random: Sequence[Sequence[Transform]], images: Samples, tensors: Samples, indices: Sequence[int]
) -> None:
    """Raise `ConfigError` if random transforms do anything else to tensors than to PIL images, apart from rounding.

    Images are compared before a transform of torchvision converts them; those after it get a tensor in either case.

    Args:
        random: the random transforms of each attribute of the dataset.
        images: its samples with PIL images.
        tensors: its samples with tensors in their place.
        indices: of the samples that are compared.
    """
    before = [list(takewhile(_keeps_images, transforms)) for transforms in random]
    converts = [len(kept) < len(transforms) for kept, transforms in zip(before, random, strict=True)]
    try:
        all_expected = _transform_images(before, images, indices)
        all_actual = _transform_images([tensor_transforms(transforms) for transforms in before], tensors, indices)
        for (index, attribute, expected), (_, _, actual) in zip(all_expected, all_actual, strict=True):
            is_converted = isinstance(expected, Image.Image) and converts[attribute]
            with error_context(f"sample {index}"):
                _check_close(actual, to_tensor(expected) if is_converted else expected)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error


def _keeps_images(transform: Transform) -> bool:
    return torchvision_name(transform) not in CONVERTING


def _transform_images(
    transforms: Sequence[Sequence[Transform]], samples: Samples, indices: Sequence[int]
) -> list[tuple[int, int, Any]]:
    """The sample index, the attribute, and the transformed image of each call. All calls draw the same numbers."""
    transformed = []
    with preserved_random_state(transforms):
        seed_generators(0, 0, 0)
        for index in indices:
            with error_context(f"sample {index}"):
                for attribute, inputs in samples[index].calls:
                    if not isinstance(inputs, tuple) or len(inputs) > 1:
                        raise DataError("its transform gets more than a picture")
                    transformed.append((index, attribute, apply_transforms(transforms[attribute], inputs)[0]))
    return transformed


def _check_close(actual: Any, expected: Any) -> None:
    """Raise `DataError` unless two tensors are equal apart from rounding; floats are taken as 0 to 1."""
    if not isinstance(expected, Tensor) or _signature(actual) != _signature(expected):
        raise DataError(
            f"its transforms make {_signature(actual)} of a tensor, and {_signature(expected)} of a PIL image"
        )
    scale = 255 if expected.is_floating_point() else 1
    differences = scale * (actual.double() - expected.double()).abs()
    if (differences > TOLERANCE).any():
        largest = differences.max().item()
        raise DataError(
            f"pixels differ by up to {largest:.3g} of 255 from PIL's, more than the {TOLERANCE} of rounding"
        )


def _signature(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
