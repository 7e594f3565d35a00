"""What happens to a batch on its device before the model sees it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitmnist.data.dataset import Split
from vitmnist.registry import NoOptions, Registry

AUGMENTS: Registry[nn.Module] = Registry("data/augment")


@AUGMENTS.register("none")
def no_augment(options: NoOptions) -> nn.Module:
    """Images as they are."""
    return nn.Identity()


class Preprocess(nn.Module):
    """Normalise uint8 images `[B, C, H, W]` to float32, bit for bit as torchvision's `ToTensor` and `Normalize` do.

    Float images come from a loader that has normalised them itself, and pass. Bytes cross the bus as bytes: a
    quarter of what float32 would be.

    Args:
        split: whose channel statistics are used.
        augment: applied to the normalised images.
    """

    mean: Tensor
    std: Tensor
    white: Tensor

    def __init__(self, split: Split, augment: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(split.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(split.std).view(-1, 1, 1))
        # A tensor and not the number 255: CUDA divides by a number by multiplying with its rounded reciprocal.
        self.register_buffer("white", torch.tensor([255.0]))
        self.augment = augment or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """float32 `[B, C, H, W]`; the batch itself is never written to."""
        if not images.is_floating_point():
            images = images.float().div_(self.white).sub_(self.mean).div_(self.std)
        augmented: Tensor = self.augment(images)
        return augmented
