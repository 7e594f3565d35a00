"""The base classes of augmentation operations, their registry, and their random numbers.

The random numbers are pure functions of (seed, epoch, index), and the same on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitmnist.config.validation import config_field
from vitmnist.data.sampler import EpochSampler
from vitmnist.registry import ConfigGroup

SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # The published constant, as a signed int64.
NUMBERS_PER_BOX = 4  # `draw_boxes` uses this many numbers per image; its callers use the indices from here on.
MAX_NUMBERS = 64  # Maximum number of random numbers of an operation per image.


class Operation(nn.Module):
    """Changes each image on its own: `forward(images, *params)`, where `params` is the result of `draw`.

    The images are float32 `[B, C, H, W]` in 0…1, and `forward` may modify them. Pixels without a source become 0. Large
    images on the CPU are passed one at a time, from several threads.
    """

    takes_uint8 = False
    """Whether `forward` also takes a single large uint8 image on the CPU and returns uint8, without modifying it."""
    is_crop = False
    """Whether `forward` returns images of the size `crop_size`."""
    crop_size: tuple[int, int] | None = None
    """Height and width of the model's input, which `Compose` sets; None: the size of the images."""

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.options = options

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """Draw the random parameters for images of this size, `[B, …]` each, from the images' keys, int64 `[B]`."""
        raise NotImplementedError


@dataclass
class MixingOptions:
    """alpha: weights follow Beta(alpha, alpha). Near 0, few images are mixed; 1 is uniform."""

    alpha: float = config_field(1.0, above=0, at_most=10)


class Mixing(nn.Module):
    """Mixes images with their partners: `forward(images, partners, keys)`, where both are float32 `[B, C, H, W]`.

    Returns the mixed images and the weight of `images` in them: max(w, 1 - w) with w ~ Beta(alpha, alpha), as in
    fastai, so an image's own label dominates. Swapping w and 1 - w only decides which image counts as the first of a
    pair, because each image is also a partner.
    """

    QUANTILES = 4096  # Size of the table of the beta distribution, which is interpolated linearly.
    quantiles: Tensor

    def __init__(self, options: MixingOptions) -> None:
        super().__init__()
        self.alpha = alpha = options.alpha
        # Tabulate u = x^alpha instead of the smaller weight x: for alpha < 1, the density of x has a pole at 0, and
        # the density of u has none.
        u = np.linspace(0, 0.5**alpha, self.QUANTILES + 1)
        density = (1 - u ** (1 / alpha)) ** (alpha - 1)
        cumulated = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
        quantiles = np.interp(np.linspace(0, 1, self.QUANTILES + 1), cumulated / cumulated[-1], u)
        self.register_buffer("quantiles", torch.from_numpy(quantiles))

    def draw_weights(self, keys: Tensor, index: int) -> Tensor:
        """Draw the weight of each image, float32 `[B]`, from 0.5 to 1."""
        position = random_uniform(keys, index) * self.QUANTILES
        low = position.long()
        u = torch.lerp(self.quantiles[low], self.quantiles[low + 1], position - low)
        return (1 - u ** (1 / self.alpha)).float()


OPERATIONS = ConfigGroup[object, [], Operation | Mixing]("data.augment.operations", __package__)


def draw_keys(sampler: EpochSampler, epoch: int, device: torch.device, start: int = 0) -> Tensor:
    """Draw a key, as in `jax.random`, for each image from batch `start` on: a random int64, in the order of batches."""
    # The spawn key differs from the sampler's, (epoch,), so augmentation is independent of the order.
    (base,) = np.random.SeedSequence(sampler.seed, spawn_key=(epoch, 1)).generate_state(1, np.uint64)
    return _mix64(sampler.sample_ids(epoch, start, device) * SPLITMIX_INCREMENT + (int(base) - 2**63))


def derive_keys(keys: Tensor, index: int) -> Tensor:
    """Derive independent keys for the operation at an index of the list; index 0 gets `keys` unchanged."""
    return keys + SPLITMIX_INCREMENT * MAX_NUMBERS * index % 2**63


def random_bits(keys: Tensor, index: int) -> Tensor:
    """Draw 31 random bits per key, as int64, independently for each `index`."""
    return _shift_right(_mix64(keys + SPLITMIX_INCREMENT * (index + 1) % 2**63), 33)


def random_uniform(keys: Tensor, index: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draw a uniform float64 from [low, high) per key, independently for each `index`."""
    return random_bits(keys, index).double().mul_((high - low) * 2**-31).add_(low)


def _mix64(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, 2014, doi:10.1145/2660193.2660195), elementwise on int64."""
    state = (state ^ _shift_right(state, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ _shift_right(state, 27)) * (0x94D049BB133111EB - 2**64)
    return torch.bitwise_xor(state, _shift_right(state, 31))


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros; torch's `>>` repeats the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)


class Boxes(NamedTuple):
    """Boxes in pixels, int64 `[B]` each. The row `bottom` and the column `right` are outside the box."""

    top: Tensor
    left: Tensor
    bottom: Tensor
    right: Tensor

    def mask(self, height: int, width: int) -> Tensor:
        """Return 1.0 for pixels in the box of their image, else 0.0: float32 `[B, 1, H, W]`, a weight for `lerp`."""
        rows, columns = (torch.arange(side, device=self.top.device) for side in (height, width))
        in_rows = (rows >= self.top[:, None]) & (rows < self.bottom[:, None])
        in_columns = (columns >= self.left[:, None]) & (columns < self.right[:, None])
        return in_rows.float()[:, None, :, None] * in_columns.float()[:, None, None, :]


def draw_boxes(keys: Tensor, scale: Sequence[float], ratio: Sequence[float], height: int, width: int) -> Boxes:
    """Draw boxes of random area, shape and position in images of this size.

    The area, as a fraction of the image, is uniform in `scale`; log(width / height) is uniform in log(`ratio`). A side
    longer than the image is shortened to it; torchvision draws again, up to ten times.
    """
    # Compute in float64, so that rounding to pixels is the same on every device.
    area = random_uniform(keys, 0, *scale) * (height * width)
    aspect = random_uniform(keys, 1, *map(math.log, ratio)).exp()
    box_height = (area / aspect).sqrt().round().clamp(1, height)
    box_width = (area * aspect).sqrt().round().clamp(1, width)
    top = (random_uniform(keys, 2) * (height - box_height + 1)).long()
    left = (random_uniform(keys, 3) * (width - box_width + 1)).long()
    return Boxes(top, left, top + box_height.long(), left + box_width.long())


def draw_partners(keys: Tensor, is_valid: Tensor) -> Tensor:
    """Return the row of each image's partner: the next valid image in the order of random numbers.

    Each valid image is the partner of exactly one image. Padding is its own partner, so it affects no valid image.
    """
    order = random_bits(keys, 0).where(is_valid, 2**31).argsort(stable=True)
    positions = torch.arange(len(keys), device=keys.device)
    count = is_valid.sum()
    following = torch.where(positions + 1 == count, 0, positions + 1).where(positions < count, positions)
    # `scatter_` would be slower where torch must be deterministic.
    return order[following][order.argsort()]
