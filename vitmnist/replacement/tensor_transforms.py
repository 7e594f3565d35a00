"""Transforms of PIL images as transforms of uint8 tensors, and their random parameters, drawn before they run."""

import inspect
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import error_context
from vitmnist.replacement.split_transforms import Transform

Shape = tuple[int, ...]
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
RANDOM = ("RandomCrop", *SAME_DRAWS_IN_V2)
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
"""Deterministic transforms that change the shape of an image."""
SHAPE_KEEPING = ("ToFloat", "ToImage", "Normalize", "ConvertImageDtype", "ToDtype", "ToPureTensor")


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


def tensor_transforms(transforms: Iterable[Transform]) -> list[Transform]:
    """The same transforms for uint8 tensors `[C, H, W]`, with the attributes that they have now.

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


def torchvision_name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module, or ""; a user's of the same name may do something else."""
    cls = type(transform)
    return cls.__name__ if cls.__module__.startswith((V1, V2, __name__)) else ""


def _as_v2(transform: Transform) -> Transform:
    from torchvision.transforms import v2

    cls = getattr(v2, type(transform).__name__)
    return cls(**{name: getattr(transform, name) for name in _parameters(cls)})  # type: ignore[no-any-return]


@lru_cache
def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)


def _separate_padding(crop: Any) -> list[Transform]:
    """A `RandomCrop` of v1 in two steps: padding, and a crop without padding."""
    from torchvision.transforms import v2

    unpadded = copy(crop)
    unpadded.padding = None
    return [v2.Pad(crop.padding, crop.fill, crop.padding_mode), unpadded]


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw_parameters` knows the class of a transform; a user's subclass may draw more."""
    has_other_shape = any(getattr(transform, option, False) for option in ("expand", "pad_if_needed"))
    changes_input = getattr(transform, "inplace", False)
    is_known = all(
        torchvision_name(converted) in (*RANDOM, *RESIZING, *SHAPE_KEEPING)
        for converted in _tensor_transform(transform)
    )
    return is_known and not has_other_shape and not changes_input


def draw_parameters(transforms: Sequence[Transform], shape: Shape) -> tuple[list[Transform], Shape]:
    """Draw the parameters of the transforms of an image from torch's generator, in torchvision's order.

    Args:
        transforms: those of `tensor_transforms`.
        shape: `[C, H, W]` of the image.

    Returns:
        Deterministic transforms, without those that are not applied, and the shape that they give the image.
    """
    steps: list[Transform] = []
    for transform in transforms:
        name = torchvision_name(transform)
        with error_context(f"the transform {name}"):  # A crop may be larger than the image.
            steps += _draw(transform, _meta_image(shape)) if name in RANDOM else [transform]
        if name in RESIZING:
            shape = tuple(transform(_meta_image(shape)).shape)
        elif name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)  # type: ignore[attr-defined]
    return steps, shape


@lru_cache(maxsize=1024)
def _meta_image(shape: Shape) -> Tensor:
    """An image without memory, for which parameters are drawn."""
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
    """A box of an image, resized as by a `RandomResizedCrop`."""
    from torchvision.transforms.v2 import functional

    crop = image[..., top : top + height, left : left + width]
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps.
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]
