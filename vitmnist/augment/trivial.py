"""TrivialAugment (Müller and Hutter, arXiv:2103.10158), and each of its operations alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitmnist.augment.base import OPERATIONS, random_bits, random_uniform
from vitmnist.augment.operations import Affine, to_grey
from vitmnist.config.validation import config_field

# The strongest change of each geometric operation.
GEOMETRIC = {"rotate": math.radians(135), "shear_x": 0.99, "shear_y": 0.99, "translate_x": 32, "translate_y": 32}
BLENDING = ("color", "sharpness")
# The new value of a pixel depends on its old value alone, so a table of 256 values per channel computes all of these.
TABULATED = ("brightness", "contrast", "posterize", "solarize", "autocontrast", "equalize")
NAMES = ("identity", *GEOMETRIC, *BLENDING, *TABULATED)


@dataclass
class StrengthOptions:
    """p: probability of a change. strength: weakest and strongest change, relative to the paper's strongest."""

    p: float = config_field(1.0, at_least=0, at_most=1)
    strength: tuple[float, float] = config_field((0.0, 1.0), is_range=True, at_least=0, at_most=1)


class TrivialAugment(Affine):
    """Applies one of `names` with one of 31 strengths to each image. Both are drawn uniformly.

    The strongest changes are as in the paper's wide space: a shear of 0.99, 32 pixels, 135 degrees, blending factors
    of 0.01 and 1.99, 2 bits, and inverting all pixels. Unlike torchvision's `TrivialAugmentWide`, this shears about the
    centre, interpolates bilinearly, translates by fractions of a pixel, and rounds no result to 8 bits.
    """

    def __init__(self, names: tuple[str, ...], options: StrengthOptions) -> None:
        super().__init__(options)
        self.names = names

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """Draw the transform for `affine_grid`, the index in `NAMES`, the strength in 0…1, and the blending factor."""
        low, high = self.options.strength
        # The names of an instance are consecutive in `NAMES`.
        operation = NAMES.index(self.names[0]) + random_bits(keys, 0) % len(self.names)
        operation = operation.where(random_uniform(keys, 1) < self.options.p, 0)
        strength = low + (high - low) / 30 * (random_bits(keys, 2) % 31).double()
        signed = (strength * (1 - 2 * (random_bits(keys, 3) % 2))).float()
        amounts = [torch.where(operation == NAMES.index(name), limit * signed, 0) for name, limit in GEOMETRIC.items()]
        transforms = self.inverse_transforms([*amounts, torch.ones_like(signed)], height, width)
        return transforms, operation, strength, 1 + 0.99 * signed

    def forward(self, images: Tensor, *params: Tensor) -> Tensor:
        transforms, operation, strength, factor = params
        if not {*GEOMETRIC}.isdisjoint(self.names):
            images = images.lerp(super().forward(images, transforms), _mask_group(GEOMETRIC, operation))
        if not {*BLENDING}.isdisjoint(self.names):
            images = _blend(images, operation, factor)
        if not {*TABULATED}.isdisjoint(self.names):
            images = _replace_values(images, operation, strength, factor)
        return images


def _mask_group(names: Iterable[str], operation: Tensor) -> Tensor:
    """Return 1.0 where the operation of an image is in a group, else 0.0: `[B, 1, 1, 1]`, a weight for `lerp`."""
    indices = [*map(NAMES.index, names)]
    return ((operation >= indices[0]) & (operation <= indices[-1])).float()[:, None, None, None]


def _blend(images: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Blend images with Pillow's degenerate images: grey ones (color) or smooth ones (sharpness)."""
    # Pillow's kernel has a weight of 5/13 at its centre and 1/13 at its eight neighbours, and keeps the border.
    smooth = images.clone()
    columns = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    sums = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:]
    smooth[..., 1:-1, 1:-1].mul_(4).add_(sums).div_(13)
    degenerate = smooth.lerp_(to_grey(images), _mask_group(("color",), operation))
    # With a weight of 1, `lerp` returns the image itself.
    weights = 1 + (factor[:, None, None, None] - 1) * _mask_group(BLENDING, operation)
    return torch.lerp(degenerate, images, weights).clamp_(0, 1)


def _replace_values(images: Tensor, operation: Tensor, strength: Tensor, factor: Tensor) -> Tensor:
    """Replace the 8-bit values of each channel by those in a table."""
    levels = images.mul(255).round_().long().flatten(2)
    values = torch.arange(256, device=images.device)
    histogram = levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, levels.new_ones(1).expand_as(levels))
    operation, strength, factor = (numbers[:, None, None] for numbers in (operation, strength, factor))
    # Sums of integers are exact in any order.
    mean = to_grey((histogram * values).sum(dim=2, keepdim=True).float() / levels.shape[2])
    lowest = values.where(histogram > 0, 255).amin(dim=2, keepdim=True)
    highest = values.where(histogram > 0, 0).amax(dim=2, keepdim=True)
    bits = (6 * strength).round().long()
    # Pillow equalises in this way; the pixels of the highest value do not count.
    pixels_per_value = (levels.shape[2] - histogram.gather(2, highest)) // 255
    equalized = (histogram.cumsum(dim=2) - histogram + pixels_per_value // 2) // pixels_per_value.clamp(min=1)
    tables = {
        "brightness": factor * values,
        "contrast": mean.lerp(values.float(), factor),
        "posterize": values >> bits << bits,
        "solarize": values.where(values < (255 * (1 - strength)).float(), 255 - values),
        "autocontrast": values.where(lowest == highest, (values - lowest) * 255 / (highest - lowest).clamp(min=1)),
        "equalize": equalized.where(pixels_per_value > 0, values),
    }
    table = values.expand_as(histogram)
    for name, replacements in tables.items():
        table = replacements.where(operation == NAMES.index(name), table)
    replaced = table.float().clamp_(0, 255).div_(255).gather(2, levels).view_as(images)
    return images.lerp(replaced, _mask_group(TABULATED, operation.flatten()))


OPERATIONS.register("trivial", StrengthOptions)(partial(TrivialAugment, NAMES))
for _name in NAMES[1:]:
    OPERATIONS.register(_name, StrengthOptions)(partial(TrivialAugment, (_name,)))
