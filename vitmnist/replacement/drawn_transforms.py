"""torchvision's random transforms in two steps: their parameters are drawn in order, and applied later in threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import DataError, described
from vitmnist.replacement.halves import Transform
from vitmnist.replacement.tensor_form import CLOSING, CONVERTING, Converted, NativeResize, Normalized, resized_crop

FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")
CROPS = ("RandomCrop", "RandomResizedCrop")
RANDOM = (*FLIPS, *CROPS, "ColorJitter", "RandomErasing", "RandomRotation")
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")  # these change shapes in a way that is not random
SAME_SHAPE = tuple(name.rpartition(".")[2] for name in (*CLOSING, *CONVERTING))
V2 = "torchvision.transforms.v2."

Shape = tuple[int, ...]


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw` knows the class of a transform; a user's subclass may draw more."""
    one: Any = transform.transform if isinstance(transform, NativeResize) else transform
    if isinstance(one, Converted | Normalized):
        return True
    name = type(one).__name__
    is_torchvisions = type(one).__module__.startswith(("torchvision.transforms.transforms", V2))
    changes_input = name in RANDOM and getattr(one, "inplace", False)
    has_random_shape = name == "RandomRotation" and one.expand
    return is_torchvisions and name in (*RANDOM, *RESIZING, *SAME_SHAPE) and not (changes_input or has_random_shape)


def draw(transforms: Sequence[Transform], shape: Shape) -> tuple[list[Transform], Shape]:
    """The transforms of a picture with parameters drawn from torch's generator, and the shape that they give it."""
    steps: list[Transform] = []
    for transform in transforms:
        one: Any = transform.transform if isinstance(transform, NativeResize) else transform
        name = type(one).__name__
        if name not in RANDOM:
            steps.append(transform)
            shape = _resized(transform, shape) if name in RESIZING else shape
            continue
        try:
            step = (_draw_v2 if type(one).__module__.startswith(V2) else _draw_v1)(one, name, _like(shape))
        except Exception as error:  # such as a crop that is larger than the picture
            raise DataError(f"the transform {name} cannot be applied: {described(error)}") from error
        if step:
            steps.append(step)
        shape = (shape[0], *one.size) if name in CROPS else shape
    return steps, shape


def _draw_v2(one: Any, name: str, like: Tensor) -> Transform | None:
    if hasattr(one, "p") and torch.rand(1) >= one.p:
        return None
    params = one.make_params([like])
    if name == "RandomResizedCrop":
        return partial(resized_crop, box=tuple(params.values()), transform=one)
    return partial(one.transform, params=params)


def _draw_v1(one: Any, name: str, like: Tensor) -> Transform | None:
    from torchvision.transforms import functional

    if hasattr(one, "p") and not torch.rand(1) < one.p:
        return None
    if name in FLIPS:
        return functional.hflip if name == "RandomHorizontalFlip" else functional.vflip  # type: ignore[no-any-return]
    if name == "RandomResizedCrop":
        return partial(resized_crop, box=one.get_params(like, one.scale, one.ratio), transform=one)
    if name == "RandomErasing":
        value = [float(one.value)] if isinstance(one.value, int | float) else one.value
        *box, content = one.get_params(like, one.scale, one.ratio, None if isinstance(value, str) else value)
        return None if content is like else partial(_erased, box=box, content=content)
    if name == "RandomCrop":
        params = one.get_params(_like(_padded(one, tuple(like.shape))), one.size)
    elif name == "ColorJitter":
        params = one.get_params(one.brightness, one.contrast, one.saturation, one.hue)
    else:
        params = one.get_params(one.degrees)
    return partial(type(one).forward, SimpleNamespace(**vars(one), get_params=lambda *_: params))


def _erased(image: Tensor, box: Sequence[int], content: Tensor) -> Tensor:
    from torchvision.transforms import functional

    return functional.erase(image, *box, content)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _like(shape: Shape) -> Tensor:
    """What parameters are drawn for: a picture without pixels."""
    return torch.empty(shape, device="meta")


def _resized(transform: Any, shape: Shape) -> Shape:
    return tuple(transform(_like(shape).byte()).shape)


def _padded(crop: Any, shape: Shape) -> Shape:
    """The shape of a picture when v1's `RandomCrop` draws: it pads before."""
    from torchvision.transforms import functional

    if crop.padding is not None:
        shape = tuple(functional.pad(_like(shape), crop.padding).shape)
    channels, *sides = shape
    if crop.pad_if_needed:  # on both sides
        sides = [side if side >= least else 2 * least - side for side, least in zip(sides, crop.size, strict=True)]
    return channels, *sides
