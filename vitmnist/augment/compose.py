"""An augmentation: the list of operations in `data.augment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from vitmnist.augment.base import OPERATIONS, Mixing, Operation
from vitmnist.augment.keys import operation_keys
from vitmnist.augment.mixing import draw_partners
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError

KEY = "data.augment.operations"


@dataclass
class AugmentOptions:
    """See `conf/data/augment/compose.yaml`."""

    name: str = MISSING
    operations: list[Any] = MISSING


def build_augment(values: Mapping[str, Any]) -> Compose | None:
    """The operations of a `data.augment` section; None for an empty list.

    Raises:
        ConfigError: an unknown key, a list that contradicts its name, or as for `Compose`.
    """
    options = validate(AugmentOptions, values, "data.augment")
    if options.name == "none" and options.operations:
        raise ConfigError("data.augment.name=none: is the empty list; for operations, type data/augment=compose")
    if options.name != "none" and not options.operations:
        raise ConfigError(f"{KEY}=[]: must have an operation; without augmentation, type data/augment=none")
    return Compose(options.operations) if options.operations else None


def input_size(augment: Compose | None, height: int, width: int) -> tuple[int, int]:
    """Height and width of what the model sees of images of this size: a smaller crop in training and evaluation alike.

    Raises:
        ConfigError: images of this size cannot be augmented, or would grow, which no evaluation repeats.
    """
    found = augment.output_size(height, width) if augment else (height, width)
    if found[0] > height or found[1] > width:
        raise ConfigError(
            f"data.augment: makes images of {found[0]}×{found[1]} from those of the dataset, {height}×{width}; set the "
            "size of its random_resized_crop to null or less, or read larger images (data.dataset.size of a folder)"
        )
    return found


class Compose(nn.Module):
    """Applies operations in order; each draws random numbers of its own, by its index in the list.

    Args:
        operations: each a name and parameters, `{"name": "shift", "pixels": 3}`; others have defaults.

    Raises:
        ConfigError: an unknown operation or parameter, or a mixing one that is not the last.
    """

    operations: list[Operation]

    def __init__(self, operations: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        built = [_build(values, f"{KEY}.{index}") for index, values in enumerate(operations)]
        for index, operation in enumerate(built[:-1]):
            if isinstance(operation, Mixing):
                name = operations[index]["name"]
                raise ConfigError(f"{KEY}.{index}.name={name}: mixes finished images; move it to the end of the list")
        self.mixing = next((one for one in built if isinstance(one, Mixing)), None)
        self.operations = nn.ModuleList(one for one in built if not isinstance(one, Mixing))  # type: ignore[assignment]
        self.mixes = self.mixing is not None

    def draw(self, keys: Tensor, height: int, width: int) -> list[tuple[Tensor, ...]]:
        """What each operation draws for images of this size; `keys` are those of `augment_keys`."""
        drawn = []
        for index, operation in enumerate(self.operations):
            drawn.append(operation.draw(operation_keys(keys, index), height, width))
            height, width = operation.output_size(height, width)
        return drawn

    def forward(self, images: Tensor, drawn: Sequence[Sequence[Tensor]]) -> Tensor:
        """The images after the operations; a large one on the CPU may be uint8 until an operation takes floats only."""
        for operation, numbers in zip(self.operations, drawn, strict=True):
            if images.dtype == torch.uint8 and not operation.takes_bytes:
                images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            images = operation(images, *numbers)
        return images

    def mix(self, images: Tensor, labels: Tensor, keys: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Mix each image with a partner from the batch; only if `mixes`.

        Args:
            images: of the whole batch, as `forward` returns them, normalised.
            labels: int64 `[B]`; an image whose label is negative is padding, and neither mixed nor a partner.

        Returns:
            The mixed images, and their class probabilities, float32 `[B, classes]`: at least 0.5 for an image's own
            label, zeros for padding.
        """
        assert self.mixing is not None
        keys = operation_keys(keys, len(self.operations))
        partners = draw_partners(keys, labels >= 0)
        mixed, weights = self.mixing(images, images[partners], keys)
        one_hot = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        return mixed, one_hot[partners].lerp(one_hot, weights[:, None])

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the augmented images; raises `ConfigError` if images of this size cannot be augmented."""
        for index, operation in enumerate(self.operations):
            height, width = operation.output_size(height, width, f"{KEY}.{index}")
        return height, width


def _build(values: Any, key: str) -> Operation | Mixing:
    """An operation, with defaults for the parameters that its mapping lacks."""
    return OPERATIONS.build(OPERATIONS.complete(values) if isinstance(values, Mapping) else values, key=key)
