"""Random transforms of PIL images for uint8 tensors: their parameters are drawn first, and applied afterwards."""

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import ConfigError, name_failure
from vitmnist.replacement.split_transforms import Transform, transform_name

Shape = tuple[int, ...]
V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2."
SAME_DRAWS_IN_V2 = ("RandomResizedCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "ColorJitter", "RandomRotation")
"""Random transforms that draw the same numbers in v1 and v2 of torchvision."""
RANDOM = ("RandomCrop", *SAME_DRAWS_IN_V2)
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
NO_CHANGE = ("PILToTensor", "ToImage", "ToPureTensor")
"""Conversions that leave the values of a uint8 tensor as they are."""


@dataclass
class TensorPipeline:
    """Transforms of uint8 tensors `[C, H, W]`, then the conversion to floats, then normalisation.

    Args:
        to_float: called as `to_float(image, out=row)`; None keeps the dtype.
        mean_and_std: `[C, 1, 1]` each; None does not normalise.
    """

    transforms: list[Transform] = field(default_factory=list)
    to_float: Callable[..., Tensor] | None = None
    mean_and_std: tuple[Tensor, Tensor] | None = None


def tensor_pipeline(transforms: Iterable[Any]) -> TensorPipeline:
    """The same transforms for uint8 tensors, with the attributes that they have now.

    Those of v1 become those of v2, which are faster on bytes, where both draw the same numbers.

    Raises:
        ConfigError: another transform than the common ones of torchvision, or in another order.
    """
    pipeline = TensorPipeline()
    for transform in transforms:
        name = torchvision_name(transform)
        is_uint8 = pipeline.to_float is None and pipeline.mean_and_std is None
        if name in (*RANDOM, *RESIZING) and is_uint8 and not _changes_shape(transform):
            pipeline.transforms += _for_tensors(transform, name)
        elif name == "ToTensor" or (name == "ConvertImageDtype" and transform.dtype == torch.float32):
            pipeline.to_float = partial(torch.div, other=255)
        elif name == "ToDtype" and transform.dtype == torch.float32 and transform.scale:
            pipeline.to_float = partial(torch.mul, other=1 / 255)
        elif name == "Normalize" and pipeline.mean_and_std is None:
            mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
            pipeline.mean_and_std = mean, std
        elif name not in NO_CHANGE:
            raise ConfigError(
                f"transforms='tensor' applies crops, flips, ColorJitter, RandomRotation and resizing of torchvision, "
                f"then ToTensor and Normalize, not {transform_name(transform)} as it is; use transforms='exact'"
            )
    return pipeline


def torchvision_name(transform: Transform) -> str:
    """The name of a class of torchvision, or ""; a user's of the same name may do something else."""
    cls = type(transform)
    return cls.__name__ if cls.__module__.startswith((V1, V2)) else ""


def _changes_shape(transform: Transform) -> bool:
    return any(getattr(transform, option, False) for option in ("expand", "pad_if_needed"))


def _for_tensors(transform: Any, name: str) -> list[Transform]:
    from torchvision.transforms import v2

    if type(transform).__module__ != V1:
        return [transform]
    if name in ("Resize", *SAME_DRAWS_IN_V2):
        cls = getattr(v2, name)
        return [cls(**{parameter: getattr(transform, parameter) for parameter in _parameters(cls)})]
    if name != "RandomCrop" or transform.padding is None:
        return [transform]
    unpadded = copy(transform)
    unpadded.padding = None
    return [v2.Pad(transform.padding, transform.fill, transform.padding_mode), unpadded]


@lru_cache
def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)


def draw_parameters(transforms: Iterable[Any], shape: Shape) -> tuple[list[Transform], Shape]:
    """Draw the parameters of the transforms of an image from torch's generator, in torchvision's order.

    Args:
        shape: `[C, H, W]` of the image.

    Returns:
        Deterministic transforms, without those that are not applied, and the shape that they give the image.
    """
    steps: list[Transform] = []
    for transform in transforms:
        name = torchvision_name(transform)
        with name_failure(f"the transform {name}"):  # A crop may be larger than the image.
            steps += _draw(transform, _meta_image(shape)) if name in RANDOM else [transform]
        if name in RESIZING:
            shape = tuple(transform(_meta_image(shape)).shape)
        elif name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)
    return steps, shape


@lru_cache(maxsize=1024)
def _meta_image(shape: Shape) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def _draw(transform: Any, image: Tensor) -> list[Transform]:
    from torchvision.transforms.v2 import functional

    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return []
    if type(transform).__module__ == V1:  # Only RandomCrop: in v2 it draws no number for a side that is not cropped.
        top, left, height, width = transform.get_params(image, transform.size)
        return [partial(functional.crop, top=top, left=left, height=height, width=width)]
    params = transform.make_params([image])
    if torchvision_name(transform) == "RandomResizedCrop":
        return [partial(_crop_and_resize, transform=transform, **params)]
    return [partial(transform.transform, params=params)]


def _crop_and_resize(image: Tensor, transform: Any, top: int, left: int, height: int, width: int) -> Tensor:
    from torchvision.transforms.v2 import functional

    crop = image[..., top : top + height, left : left + width]
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps.
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]
