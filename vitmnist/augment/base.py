"""The base classes of augmentation operations, and their registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitmnist.registry import Registry


class Operation(nn.Module):
    """Changes each image on its own; `forward(images, *drawn)`, with what `draw` returns.

    `images` are float32 `[B, C, H, W]` of 0…1, which it may write to; pixels without a source become 0. Large images on
    the CPU come one by one, from several threads.
    """

    takes_bytes = False
    """Whether a large image on the CPU may also come as uint8, which it does not write to, and returns as uint8."""

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.options = options

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """Random parameters of images of this size, by their keys, int64 `[B]`; each `[B, …]`."""
        raise NotImplementedError

    def output_size(self, height: int, width: int, key: str = "") -> tuple[int, int]:
        """Height and width of the augmented images.

        Args:
            key: where the options are in the configuration.

        Raises:
            ConfigError: images of this size cannot be augmented.
        """
        return height, width


class Mixing(nn.Module):
    """Mixes images with their partners; `forward(images, partners, keys)`, both float32 `[B, C, H, W]`.

    Returns new images, and the weight of `images` in them: float32 `[B]`, 0.5 to 1.
    """


OPERATIONS: Registry[Operation | Mixing] = Registry("data/augment.operations", __package__)
