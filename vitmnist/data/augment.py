"""Augmentation of a whole batch on its device, its randomness keyed by (seed, epoch, index in the set).

What happens to an image depends on nothing else: not on the loader, the number of workers, or the batch it stands in.
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

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as the signed number that int64 holds


class Augment(nn.Module):
    """Changes normalised images; `forward(images, keys, black)`.

    `images` are float32 `[B, C, H, W]`, `keys` int64 `[B]` as `augment_keys` gives them, `black` float32 `[C, 1, 1]` is
    what a byte of zero became, with which the margins are filled. Returns new images of the same shape.
    """

    pixels: float

    def check(self, height: int, width: int) -> None:
        """Raise `ConfigError` if images of this size would be moved out of sight."""
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
    """Moves each image by a whole number of pixels, up to `pixels` in each direction, all equally likely."""

    def __init__(self, options: ShiftOptions) -> None:
        super().__init__()
        self.pixels = options.pixels

    def forward(self, images: Tensor, keys: Tensor, black: Tensor) -> Tensor:
        size, channels, height, width = images.shape
        margin = int(self.pixels)
        framed = black.expand(size, channels, height + 2 * margin, width + 2 * margin).contiguous()
        framed[:, :, margin : margin + height, margin : margin + width] = images
        # Every position of a window in the frame, as a view; then one gather takes each image's own.
        windows = framed.unfold(2, height, 1).unfold(3, width, 1)
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
    """Rotates, scales, shears and moves each image about its centre, each evenly drawn up to its bound; bilinear."""

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
        # From a pixel of the result to where it comes from, in pixels about the centre. affine_grid wants units of half
        # a side: a turn would be a shear where an image is not square.
        aspect = height / width
        rows = [
            torch.stack([cos, (cos * shear - sin) * aspect, 2 * right / width], dim=1),
            torch.stack([sin / aspect, sin * shear + cos, 2 * down / height], dim=1),
        ]
        grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
        # Relative to black, because what lies outside counts as zero.
        return F.grid_sample(images - black, grid, align_corners=False).add_(black)


def augment_keys(sampler: EpochSampler, epoch: int, device: torch.device, start: int = 0) -> Tensor:
    """A random number for each image of an epoch from batch `start` on, in the order of its batches: int64."""
    # A spawn key of its own: the order of the epoch is drawn from (epoch,).
    (base,) = np.random.SeedSequence(sampler.seed, spawn_key=(epoch, 1)).generate_state(1, np.uint64)
    return _mix(sampler.indices(epoch, start, device) * GOLDEN + (int(base) - 2**63))


def _random_bits(keys: Tensor, number: int) -> Tensor:
    """31 random bits for each key, as int64; each `number` gives others."""
    return _shifted(_mix(keys + GOLDEN * (number + 1) % 2**63), 33)


def _random_signed(keys: Tensor, number: int) -> Tensor:
    """Evenly distributed in -1…1, float32; each `number` gives others."""
    return _random_bits(keys, number).double().mul_(2**-30).sub_(1).float()


def _mix(numbers: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, 2014, doi:10.1145/2660193.2660195), elementwise on int64."""
    numbers = (numbers ^ _shifted(numbers, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ _shifted(numbers, 27)) * (0x94D049BB133111EB - 2**64)
    mixed: Tensor = numbers ^ _shifted(numbers, 31)
    return mixed


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros, which torch has not for signed numbers."""
    shifted: Tensor = (numbers >> bits) & (2 ** (64 - bits) - 1)
    return shifted
