"""Mixup and cutmix: each image is mixed with a partner from its batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitmnist.augment.base import OPERATIONS, Mixing
from vitmnist.augment.keys import Boxes, random_bits, random_uniform
from vitmnist.config.validation import bounded

QUANTILES = 4096  # of the beta distribution, with linear interpolation in between


@dataclass
class MixingOptions:
    """alpha: of the distribution Beta(alpha, alpha) of the weights; near 0 mixes few images, 1 is uniform."""

    alpha: float = bounded(1.0, above=0, at_most=10)


class BetaMixing(Mixing):
    """Draws the larger one of the two weights that Beta(alpha, alpha) gives to an image and its partner.

    Each image is mixed once as itself and once as a partner, so giving the larger weight to the image itself (as fastai
    does) only changes the pairs, and its own label stays the dominant one.
    """

    quantiles: Tensor

    def __init__(self, options: MixingOptions) -> None:
        super().__init__()
        self.alpha = alpha = options.alpha
        # The smaller weight is x = u^(1/alpha): in u, the density x^(alpha-1) (1-x)^(alpha-1) has no pole at 0.
        u = np.linspace(0, 0.5**alpha, QUANTILES + 1)
        density = (1 - u ** (1 / alpha)) ** (alpha - 1)
        cumulated = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
        at = np.interp(np.linspace(0, 1, QUANTILES + 1), cumulated / cumulated[-1], u)
        self.register_buffer("quantiles", torch.from_numpy(at))

    def weights(self, keys: Tensor, number: int) -> Tensor:
        """The weight of each image, float32 `[B]`, 0.5 to 1."""
        position = random_uniform(keys, number) * QUANTILES
        low = position.long()
        u = torch.lerp(self.quantiles[low], self.quantiles[low + 1], position - low)
        return (1 - u ** (1 / self.alpha)).float()


@OPERATIONS.register("mixup", MixingOptions)
class Mixup(BetaMixing):
    """Averages two images (Zhang et al., arXiv:1710.09412)."""

    def forward(self, images: Tensor, partners: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(keys, 1)
        return partners.lerp(images, weights[:, None, None, None]), weights


@OPERATIONS.register("cutmix", MixingOptions)
class Cutmix(BetaMixing):
    """Pastes a box of the partner (Yun et al., arXiv:1905.04899); the weight is the area that is left.

    If the partner would get the larger area, they swap: the image keeps the box, the partner fills the rest.
    """

    def forward(self, images: Tensor, partners: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        larger = self.weights(keys, 1)
        # Draw the box with either weight, and give the image the larger area afterwards: boxes are cut at the rim, so
        # drawing them from the smaller weights alone would paste less than the paper does.
        half = 0.5 * (1 - larger.where(random_bits(keys, 4) % 2 == 0, 1 - larger)).sqrt()
        edges = []
        for number, side in ((2, height), (3, width)):
            centre, reach = random_bits(keys, number) % side, (half * side).long()
            edges.append(((centre - reach).clamp_(min=0), (centre + reach).clamp_(max=side)))
        (top, bottom), (left, right) = edges
        box = Boxes(top, left, bottom, right).mask(height, width)
        outside = 1 - (bottom - top) * (right - left) / (height * width)
        pasted = box.where((outside >= 0.5)[:, None, None, None], 1 - box)
        return images.lerp(partners, pasted), outside.maximum(1 - outside)


def draw_partners(keys: Tensor, is_valid: Tensor) -> Tensor:
    """The row of each image's partner: the next one, in the order of their random numbers, among the valid images.

    Each valid image is thus the partner of exactly one, and never of itself if there are two or more. Padding is its
    own partner, so its content reaches no valid image.
    """
    order = random_bits(keys, 0).where(is_valid, 2**31).argsort(stable=True)
    positions = torch.arange(len(keys), device=keys.device)
    count = is_valid.sum()
    following = torch.where(positions + 1 == count, 0, positions + 1).where(positions < count, positions)
    # Not scatter_, which torch replaces by a slower one where it must be deterministic.
    return order[following][order.argsort()]
