"""What an augmentation is, and the registries of augmentations and of the operations that compose one."""

from __future__ import annotations

from torch import Tensor, nn

from vitmnist.registry import NoOptions, Registry


class Augment(nn.Module):
    """Changes normalised images; `forward(images, keys, black)`.

    `images` are float32 `[B, C, H, W]`, `keys` int64 `[B]` from `augment_keys`, and `black` float32 `[C, 1, 1]`, the
    normalised value of zero, fills the margins. Returns new images.
    """

    unit_range = False
    """Takes pixels of 0…1 instead of normalised ones; `Preprocess` converts them, and `black` is zero."""
    mixes = False
    """Also mixes images of the batch, by `mix`."""

    def check(self, height: int, width: int, key: str = "data.augment") -> None:
        """Raise `ConfigError` if images of this size cannot be augmented; `key` is the place of the options."""

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the augmented images."""
        return height, width

    def mix(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix each image with a partner from the batch; only if `mixes`.

        Args:
            images: of the whole batch, as `forward` returns them, normalised.
            labels: int64 `[B]`; an image whose label is negative is padding, and neither mixed nor a partner.

        Returns:
            The mixed images, the labels of their partners, and the weight of each image's own label, 0.5 to 1.
        """
        raise NotImplementedError


class Mixing(nn.Module):
    """Mixes images with their partners; `forward(images, partners, keys)`, both float32 `[B, C, H, W]`.

    Returns new images, and the weight of `images` in them: float32 `[B]`, 0.5 to 1.
    """


AUGMENTS: Registry[Augment | None] = Registry("data/augment")
OPERATIONS: Registry[Augment | Mixing] = Registry("data/augment.operations")


@AUGMENTS.register("none")
def none(options: NoOptions) -> None:
    """Images as they are."""
