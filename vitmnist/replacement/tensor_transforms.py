"""Applies torchvision's transforms to uint8 tensors instead of PIL images, and draws their parameters in advance.

To support another random transform, add its name to `SAME_DRAWS_IN_V2`, and an example to `of_either_version` in
tests/replacement/test_tensor_dataset.py. If v1 and v2 draw different numbers, add it to `RANDOM_TRANSFORMS` alone, and
`_draw_transform` needs a case for v1. If it changes the shape, `draw_parameters` needs the new shape.
"""

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import ConfigError, as_data_error
from vitmnist.replacement.split_transforms import Transform, get_transform_name

Shape = tuple[int, ...]
"""The shape `[C, H, W]` of an image."""
V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2."
"""The module of torchvision's transforms of v1, and the prefix of the modules of v2."""
SAME_DRAWS_IN_V2 = ("RandomResizedCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "ColorJitter", "RandomRotation")
"""The random transforms that draw the same numbers in v1 and v2. Those of v1 are applied as v2, which is faster."""
RANDOM_TRANSFORMS = ("RandomCrop", *SAME_DRAWS_IN_V2)
"""The supported random transforms."""
SHAPE_TRANSFORMS = ("Resize", "CenterCrop", "Pad", "Grayscale")
"""The supported deterministic transforms that change the shape."""
IDENTITY_TRANSFORMS = ("PILToTensor", "ToImage", "ToPureTensor")
"""The conversions that do not change the values of a uint8 tensor."""


@dataclass
class TensorPipeline:
    """Transforms of uint8 tensors `[C, H, W]`, followed by the conversion to floats and by normalisation."""

    transforms: list[Transform] = field(default_factory=list)
    to_float: Callable[..., Tensor] | None = None  # Called as `to_float(image, out=row)`. None keeps the dtype.
    mean_and_std: tuple[Tensor, Tensor] | None = None  # `[C, 1, 1]` each. None does not normalise.


def build_tensor_pipeline(transforms: Iterable[Any]) -> TensorPipeline:
    """Convert transforms of PIL images to transforms of uint8 tensors, with their current attributes.

    A transform of v1 becomes its equivalent of v2, which is faster on uint8, if both draw the same numbers.

    Raises:
        ConfigError: a transform is not supported at all, or not in its position.
    """
    pipeline = TensorPipeline()
    for transform in transforms:
        name = get_torchvision_name(transform)
        is_uint8 = pipeline.to_float is None and pipeline.mean_and_std is None
        changes_shape = getattr(transform, "expand", False) or getattr(transform, "pad_if_needed", False)
        if name in (*RANDOM_TRANSFORMS, *SHAPE_TRANSFORMS) and is_uint8 and not changes_shape:
            pipeline.transforms += _convert_transform(transform, name)
        elif name == "ToTensor" or (name == "ConvertImageDtype" and transform.dtype == torch.float32):
            pipeline.to_float = partial(torch.div, other=255)
        elif name == "ToDtype" and transform.dtype == torch.float32 and transform.scale:
            pipeline.to_float = partial(torch.mul, other=1 / 255)
        elif name == "Normalize" and pipeline.mean_and_std is None:
            mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
            pipeline.mean_and_std = mean, std
        elif name not in IDENTITY_TRANSFORMS:
            raise ConfigError(
                f"transforms='tensor' applies crops, flips, ColorJitter, RandomRotation and resizing of torchvision, "
                f"then ToTensor and Normalize, not {get_transform_name(transform)} as it is; use transforms='exact'"
            )
    return pipeline


def get_torchvision_name(transform: Transform) -> str:
    """Return the name of the class of a transform of torchvision, and an empty string for any other transform."""
    cls = type(transform)
    return cls.__name__ if cls.__module__.startswith((V1, V2)) else ""


def _convert_transform(transform: Any, name: str) -> list[Transform]:
    from torchvision.transforms import v2

    if type(transform).__module__ != V1:
        return [transform]
    if name in ("Resize", *SAME_DRAWS_IN_V2):
        cls = getattr(v2, name)
        return [cls(**{parameter: getattr(transform, parameter) for parameter in inspect.signature(cls).parameters})]
    if name != "RandomCrop" or transform.padding is None:
        return [transform]
    unpadded = copy(transform)
    unpadded.padding = None
    return [v2.Pad(transform.padding, transform.fill, transform.padding_mode), unpadded]


def draw_parameters(transforms: Iterable[Any], shape: Shape) -> tuple[list[Transform], Shape]:
    """Draw the parameters of the transforms of an image from torch's global generator, in torchvision's order.

    Returns the transforms with their parameters, and the shape of their result.
    """
    steps: list[Transform] = []
    for transform in transforms:
        name = get_torchvision_name(transform)
        with as_data_error(f"the transform {name}"):  # For example, a crop can be larger than the image.
            steps += _draw_transform(transform, _create_meta_image(shape)) if name in RANDOM_TRANSFORMS else [transform]
        if name in SHAPE_TRANSFORMS:
            shape = tuple(transform(_create_meta_image(shape)).shape)
        elif name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)
    return steps, shape


@lru_cache(maxsize=1024)
def _create_meta_image(shape: Shape) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def _draw_transform(transform: Any, image: Tensor) -> list[Transform]:
    from torchvision.transforms.v2 import functional

    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return []
    # RandomCrop is the only remaining transform of v1. In v2, it draws no number for a side that it does not crop.
    if type(transform).__module__ == V1:
        top, left, height, width = transform.get_params(image, transform.size)
        return [partial(functional.crop, top=top, left=left, height=height, width=width)]
    params = transform.make_params([image])
    if get_torchvision_name(transform) == "RandomResizedCrop":
        return [partial(_crop_and_resize, transform=transform, **params)]
    return [partial(transform.transform, params=params)]


def _crop_and_resize(image: Tensor, transform: Any, top: int, left: int, height: int, width: int) -> Tensor:
    from torchvision.transforms.v2 import functional

    crop = image[..., top : top + height, left : left + width]
    # Resizing uint8 takes half the time if the channels are last in memory and the crop is contiguous.
    if image.stride(-3) == 1:
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]
