"""What an operation of augmentation is, and the registry of operations."""

from __future__ import annotations

from torch import nn

from vitmnist.registry import Registry


class Operation(nn.Module):
    """Changes each image by itself; `forward(images, keys, black)`.

    `images` are normalised float32 `[B, C, H, W]`, `keys` int64 `[B]`, and `black` float32 `[C, 1, 1]`, the normalised
    value of zero, fills the margins. Returns new images.
    """

    unit_range = False
    """Takes pixels of 0…1 instead of normalised ones; `Preprocess` converts them, and `black` is zero."""

    def output_size(self, height: int, width: int, key: str = "") -> tuple[int, int]:
        """Height and width of the augmented images.

        Args:
            key: where the options stand in the configuration.

        Raises:
            ConfigError: images of this size cannot be augmented.
        """
        return height, width


class Mixing(nn.Module):
    """Mixes images with their partners; `forward(images, partners, keys)`, both float32 `[B, C, H, W]`.

    Returns new images, and the weight of `images` in them: float32 `[B]`, 0.5 to 1.
    """


OPERATIONS: Registry[Operation | Mixing] = Registry("data/augment.operations")
