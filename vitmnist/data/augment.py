"""Augmentation of a whole batch on its device, with random numbers keyed by (seed, epoch, index in the set).

Nothing else changes them: not the loader, the number of workers, or the other images of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.config.validation import bounded
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError
from vitmnist.registry import NoOptions, Registry

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment as a signed int64


class Augment(nn.Module):
    """Changes normalised images; `forward(images, keys, black)`.

    `images` are float32 `[B, C, H, W]`, `keys` int64 `[B]` from `augment_keys`, and `black` float32 `[C, 1, 1]`, the
    normalised value of zero, fills the margins. Returns new images of the same shape.
    """

    pixels: float

    def check(self, height: int, width: int) -> None:
        """Raise `ConfigError` if images of this size would be moved out of the frame."""
        if self.pixels >= min(height, width):
            raise ConfigError(
                f"data.augment.pixels={self.pixels:g}: must be below the side of an image, {min(height, width)}"
            )


AUGMENTS: Registry[Augment | None] = Registry("data/augment")


@AUGMENTS.register("none")
def none(options: NoOptions) -> None:
    """Images as they are."""


@dataclass
class ShiftOptions:
    """See `conf/data/augment/shift.yaml`."""

    pixels: int = bounded(2, at_least=0)


@AUGMENTS.register("shift", ShiftOptions)
class Shift(Augment):
    """Moves each image by a whole number of pixels, uniformly up to `pixels` in each direction."""

    def __init__(self, options: ShiftOptions) -> None:
        super().__init__()
        self.pixels = options.pixels

    def forward(self, images: Tensor, keys: Tensor, black: Tensor) -> Tensor:
        size, channels, height, width = images.shape
        margin = int(self.pixels)
        framed = black.expand(size, channels, height + 2 * margin, width + 2 * margin).contiguous()
        framed[:, :, margin : margin + height, margin : margin + width] = images
        windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # every position as a view; one gather picks from it
        down, right = (_random_bits(keys, number) % (2 * margin + 1) for number in (0, 1))
        return windows[torch.arange(size, device=images.device), :, down, right]


@dataclass
class AffineOptions:
    """See `conf/data/augment/affine.yaml`."""

    degrees: float = bounded(10.0, at_least=0, at_most=180)
    pixels: float = bounded(2.0, at_least=0)
    scale: float = bounded(0.1, at_least=0, below=1)
    shear_degrees: float = bounded(5.0, at_least=0, below=90)


@AUGMENTS.register("affine", AffineOptions)
class Affine(Augment):
    """Rotates, scales, shears and moves each image about its centre, each uniformly up to its bound; bilinear."""

    def __init__(self, options: AffineOptions) -> None:
        super().__init__()
        self.options = options
        self.pixels = options.pixels

    def forward(self, images: Tensor, keys: Tensor, black: Tensor) -> Tensor:
        _, _, height, width = images.shape
        angle = math.radians(self.options.degrees) * _random_signed(keys, 0)
        shear = torch.tan(math.radians(self.options.shear_degrees) * _random_signed(keys, 1))
        scale = 1 + self.options.scale * _random_signed(keys, 2)
        down, right = (self.options.pixels * _random_signed(keys, number) for number in (3, 4))
        cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
        # Maps each output pixel to its source. affine_grid's unit is half a side, so without the aspect ratio a
        # rotation would shear images that are not square.
        aspect = height / width
        rows = [
            torch.stack([cos, (cos * shear - sin) * aspect, 2 * right / width], dim=1),
            torch.stack([sin / aspect, sin * shear + cos, 2 * down / height], dim=1),
        ]
        grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
        # Relative to black, because grid_sample pads with zeros.
        return F.grid_sample(images - black, grid, align_corners=False).add_(black)


def augment_keys(sampler: EpochSampler, epoch: int, device: torch.device, start: int = 0) -> Tensor:
    """A random int64 for each image of an epoch from batch `start` on, in the order of its batches."""
    # Another spawn key than the sampler's (epoch,), so that augmentation is independent of the order.
    (base,) = np.random.SeedSequence(sampler.seed, spawn_key=(epoch, 1)).generate_state(1, np.uint64)
    return _mix64(sampler.indices(epoch, start, device) * GOLDEN + (int(base) - 2**63))


def _random_bits(keys: Tensor, number: int) -> Tensor:
    """31 random bits per key, as int64, independent for each `number`."""
    return _shift_right(_mix64(keys + GOLDEN * (number + 1) % 2**63), 33)


def _random_signed(keys: Tensor, number: int) -> Tensor:
    """Uniform in -1…1 per key, as float32, independent for each `number`."""
    return _random_bits(keys, number).double().mul_(2**-30).sub_(1).float()


def _mix64(numbers: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, 2014, doi:10.1145/2660193.2660195), elementwise on int64."""
    numbers = (numbers ^ _shift_right(numbers, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ _shift_right(numbers, 27)) * (0x94D049BB133111EB - 2**64)
    return torch.bitwise_xor(numbers, _shift_right(numbers, 31))


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's `>>` is arithmetic for signed integers."""
    return torch.bitwise_and(numbers >> bits, 2 ** (64 - bits) - 1)
