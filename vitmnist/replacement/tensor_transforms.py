"""The transforms of a dataset for tensors: without the last ones, which are applied to batches, and resizing bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.data.images import to_tensor
from vitmnist.data.randomness import preserved_random_state, seed_generators
from vitmnist.errors import ConfigError, DataError
from vitmnist.replacement.split_transforms import Inputs, SplitTransforms, Transform, apply
from vitmnist.store.samples import BYTE_MODES, Samples

# Named with their library: a user's class of the same name may do something else.
TO_FLOAT = ("torchvision.ToTensor", "timm.MaybeToTensor")
CONVERTING = (*TO_FLOAT, "torchvision.PILToTensor", "torchvision.ToImage", "timm.MaybePILToTensor")
TOLERANCE = 8.0
"""Pixels may differ by so much of 255; resizing alone rounds by up to 5."""
TRAILING = tuple(f"torchvision.{name}" for name in ("ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize"))


@dataclass(frozen=True)
class Converted:
    """Converts a picture that is a tensor already; like `ToTensor`, 0 to 255 to float 0 to 1 if `to_float`."""

    to_float: bool

    def __call__(self, image: Tensor) -> Tensor:
        return image.div(255) if self.to_float else image


class ToBytes:
    """`ToTensor` without the conversion to float, which `Converted` does."""

    def __call__(self, image: Any) -> Tensor:
        if not isinstance(image, Image.Image) or image.mode not in BYTE_MODES:
            raise DataError(
                f"{getattr(image, 'mode', type(image).__name__)} is no picture of mode {', '.join(BYTE_MODES)}"
            )
        return to_tensor(image)


@dataclass(frozen=True)
class NativeResize:
    """`Resize` or `RandomResizedCrop` of torchvision's v1 by the functions of v2, with the same random numbers.

    v1 resizes uint8 tensors as floats, which takes three times as long.
    """

    transform: Any

    def __call__(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional

        base = self.transform
        if type(base).__name__ == "Resize":
            return functional.resize(image, base.size, base.interpolation, base.max_size, base.antialias)  # type: ignore[no-any-return]
        return resized_crop(image, base.get_params(image, base.scale, base.ratio), base)


def resized_crop(image: Tensor, box: Sequence[int], transform: Any) -> Tensor:
    """What a `RandomResizedCrop` makes of a box (top, left, height, width) of a picture."""
    from torchvision.transforms.v2 import functional

    top, left, height, width = box
    crop = image[..., top : top + height, left : left + width]
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Normalized:
    """`Normalize` with constants that stay on the device; torchvision's copies them there and waits in each batch."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        mean, std = _on_device((self.mean, self.std), images.dtype, images.device)
        return torch.sub(images, mean, out=out).div_(std)


@lru_cache(maxsize=16)
def _on_device(numbers: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(part, dtype=dtype, device=device).view(-1, 1, 1) for part in numbers)


def split_trailing(
    splits: Sequence[SplitTransforms], of_tensors: bool
) -> tuple[list[SplitTransforms], list[int], list[Transform]]:
    """The random transforms of a dataset without the trailing ones, which whole batches may get.

    Args:
        of_tensors: pictures are uint8 tensors `[C, H, W]`, otherwise they are PIL images.

    Returns:
        The splits, how many transforms of each stand before the conversion to a tensor, and those for whole batches.
    """
    parts = [_split(split.random, of_tensors) for split in splits]
    if len({repr(trailing) for _, _, trailing in parts}) > 1:  # a batch may mix samples of several datasets
        parts = [(kept + trailing, pictorial, []) for kept, pictorial, trailing in parts]
    trailing = parts[0][2] if parts else []
    return [SplitTransforms(random=kept) for kept, _, _ in parts], [pictorial for _, pictorial, _ in parts], trailing


def _split(transforms: list[Transform], of_tensors: bool) -> tuple[list[Transform], int, list[Transform]]:
    names = [f"{type(part).__module__.partition('.')[0]}.{type(part).__name__}" for part in transforms]
    position = next((number for number, name in enumerate(names) if name in CONVERTING), len(names))
    steps = [_native(part) if of_tensors else part for part in transforms]
    is_trailing = [name in TRAILING for name in names]
    if of_tensors and position < len(names):
        steps[position], is_trailing[position] = Converted(names[position] in TO_FLOAT), True
    elif names[position : position + 1] == ["torchvision.ToTensor"]:
        steps[position : position + 1] = [ToBytes(), Converted(to_float=True)]
        is_trailing[position : position + 1] = [False, True]
    kept = len(steps)
    while kept and is_trailing[kept - 1]:
        kept -= 1
    trailing = [_without_waits(part) if of_tensors else part for part in steps[kept:]]
    return steps[:kept], min(position, kept), trailing


def _without_waits(transform: Any) -> Transform:
    if type(transform).__name__ != "Normalize":
        return transform  # type: ignore[no-any-return]
    mean, std = (tuple(torch.as_tensor(part).view(-1).tolist()) for part in (transform.mean, transform.std))
    return Normalized(mean, std)


def _native(transform: Transform) -> Transform:
    kind = type(transform)
    is_v1 = kind.__module__ == "torchvision.transforms.transforms"
    return NativeResize(transform) if is_v1 and kind.__name__ in ("Resize", "RandomResizedCrop") else transform


def picture_difference(
    splits: Sequence[SplitTransforms],
    of_tensors: Sequence[SplitTransforms],
    pictorial: Sequence[int],
    samples: Samples,
    indices: list[int],
) -> tuple[float, float]:
    """Mean and largest difference, of 255, of the pictures that the two forms convert to tensors.

    Raises:
        ConfigError: a transform takes no tensor, or makes other pixels of it.
    """
    tensors, means, largest = samples.with_tensors(), [], 0.0
    for index in indices:
        (numbers, _, calls), (_, _, calls_of_tensors) = samples[index], tensors[index]
        for number, inputs, inputs_of_tensors in zip(numbers, calls, calls_of_tensors, strict=True):
            end = pictorial[number]
            (expected, *_) = _seeded(splits[number].random[:end], inputs, index)
            try:
                (result, *_) = _seeded(of_tensors[number].random[:end], inputs_of_tensors, index)
            except DataError as error:
                raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
            expected = to_tensor(expected) if isinstance(expected, Image.Image) else expected
            if len(inputs) > 1 or not isinstance(expected, Tensor):
                raise ConfigError("transforms='tensor': is for transforms of one picture; use transforms='exact'")
            if result.shape != expected.shape:
                raise ConfigError("transforms='tensor': the pictures have other sizes than those of PIL images")
            # Of the range 0 to 1, if a transform has made floats already.
            difference = (result.float() - expected.float()).abs() * (255 if expected.is_floating_point() else 1)
            means.append(difference.mean().item())
            largest = max(largest, difference.max().item())
    if largest > TOLERANCE:
        raise ConfigError(
            f"transforms='tensor': pixels differ by up to {largest:.3g} of 255 from those of PIL images, more than the "
            f"{TOLERANCE:g} of rounding; use transforms='exact'"
        )
    return sum(means) / max(len(means), 1), largest


def _seeded(transforms: list[Transform], inputs: Inputs, seed: int) -> Inputs:
    with preserved_random_state(transforms):
        seed_generators(0, 0, seed)
        return apply(transforms, inputs)
