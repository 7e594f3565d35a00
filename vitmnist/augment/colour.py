"""Colour jitter: brightness, contrast, saturation and hue of each image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitmnist.augment.base import OPERATIONS, Operation
from vitmnist.augment.keys import random_uniform
from vitmnist.config.validation import bounded
from vitmnist.errors import DataError

LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601-2, as in torchvision


@dataclass
class ColorJitterOptions:
    """brightness, contrast, saturation: factors 1 - x to 1 + x, at least 0. hue: turns of the colour wheel, -x to x."""

    brightness: float = bounded(0.2, at_least=0)
    contrast: float = bounded(0.2, at_least=0)
    saturation: float = bounded(0.2, at_least=0)
    hue: float = bounded(0.0, at_least=0, at_most=0.5)


@OPERATIONS.register("color_jitter", ColorJitterOptions)
class ColorJitter(Operation):
    """Changes brightness, contrast, saturation and hue, in this order; torchvision's order is random.

    Saturation and hue change nothing in images of one channel.
    """

    def __init__(self, options: ColorJitterOptions) -> None:
        super().__init__()
        self.options = options

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """The factors of those that are not 0, float32 `[B, 1, 1, 1]`, then the turns, `[B, 1, 1]`."""
        options = self.options
        strengths = enumerate((options.brightness, options.contrast, options.saturation))
        bounds = [(number, max(0.0, 1 - strength), 1 + strength) for number, strength in strengths if strength]
        factors = [random_uniform(keys, *bound).float()[:, None, None, None] for bound in bounds]
        return *factors, random_uniform(keys, 3, -options.hue, options.hue).float()[:, None, None]

    def forward(self, images: Tensor, *drawn: Tensor) -> Tensor:
        return self.on_picture(images.clone(), *drawn)

    def on_picture(self, images: Tensor, *drawn: Any) -> Tensor:
        """In place, except for the hue. Numbers instead of tensors take a third less time: `lerp` has vector code."""
        channels = images.shape[1]
        if channels not in (1, 3):
            raise DataError(f"color_jitter: takes images of 1 or 3 channels, found {channels}; leave it out")
        *factors, turns = drawn
        factor = iter(factors)
        if self.options.brightness:
            images.mul_(next(factor)).clamp_(0, 1)
        if self.options.contrast:
            # Row by row: of a single image, torch would divide one sum among its threads, and round it accordingly.
            mean = _luma(images).contiguous().mean(dim=3, keepdim=True).mean(dim=2, keepdim=True)
            torch.lerp(mean, images, next(factor), out=images).clamp_(0, 1)
        if self.options.saturation and channels == 3:
            torch.lerp(_luma(images), images, next(factor), out=images).clamp_(0, 1)
        if self.options.hue and channels == 3:
            images = _turn_hue(images, turns)
        return images


def _luma(images: Tensor) -> Tensor:
    """The brightness of each pixel, `[B, 1, H, W]`."""
    if images.shape[1] == 1:
        return images
    # Factor by factor: a tensor of them on a GPU would be a copy in each call, for which the host waits.
    red, green, blue = (images[:, channel : channel + 1] * factor for channel, factor in enumerate(LUMA))
    return red.add_(green).add_(blue)


def _turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of RGB images `[B, 3, H, W]` in HSV space by a part of the colour wheel, `[B, 1, 1]`."""
    red, green, blue = images.unbind(dim=1)
    value = images.amax(dim=1)
    chroma = value - images.amin(dim=1)
    scale = chroma.where(chroma > 0, 1).reciprocal_()  # grey has no hue
    # Sixths of the wheel, by the strongest channel. `where` and `floor` have vector code, unlike `gather` and `%`.
    of_others = torch.where(value == green, (blue - red).mul_(scale).add_(2), (red - green).mul_(scale).add_(4))
    sector = torch.where(value == red, (green - blue).mul_(scale), of_others).add_(6 * turns)
    turned = torch.empty_like(images)
    # Each channel of a hue is a trapezoid over the wheel: https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    for channel, offset in enumerate((5, 3, 1)):
        position = sector + offset
        position -= (position / 6).floor_().mul_(6)
        trapezoid = torch.minimum(position, 4 - position).clamp_(0, 1)
        turned[:, channel] = torch.addcmul(value, chroma, trapezoid, value=-1)
    return turned
