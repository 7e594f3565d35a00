"""Augmentations that are lists of operations: `compose`, and the presets, which are such lists in `conf/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor, nn

from vitmnist.config.labels import CONF
from vitmnist.data.augment.base import AUGMENTS, OPERATIONS, Augment, Mixing
from vitmnist.data.augment.keys import operation_keys
from vitmnist.data.augment.mixing import draw_partners
from vitmnist.errors import ConfigError

PRESETS = ("compose", "cifar", "crops", "imagenet")
KEY = "data.augment.operations"


@dataclass
class ComposeOptions:
    """See `conf/data/augment/compose.yaml`; each preset has its own defaults."""

    operations: list[Any]


class Compose(Augment):
    """Applies operations in order; each draws random numbers of its own, by its place in the list.

    Raises:
        ConfigError: an unknown operation or parameter, no operation, or a mixing one that is not the last.
    """

    operations: list[Augment]

    def __init__(self, options: ComposeOptions) -> None:
        super().__init__()
        if not options.operations:
            raise ConfigError(f"{KEY}=[]: must have an operation; without augmentation, type data/augment=none")
        operations = [_build(values, f"{KEY}.{place}") for place, values in enumerate(options.operations)]
        for place, operation in enumerate(operations[:-1]):
            if isinstance(operation, Mixing):
                name = options.operations[place]["name"]
                raise ConfigError(f"{KEY}.{place}.name={name}: mixes finished images; move it to the end of the list")
        last = operations[-1]
        self.mixing = last if isinstance(last, Mixing) else None
        self.operations = nn.ModuleList(  # type: ignore[assignment]
            one for one in operations if not isinstance(one, Mixing)
        )
        self.mixes = self.mixing is not None
        self.unit_range = any(operation.unit_range for operation in self.operations)

    def forward(self, images: Tensor, keys: Tensor, black: Tensor) -> Tensor:
        for place, operation in enumerate(self.operations):
            images = operation(images, operation_keys(keys, place), black)
        return images

    def mix(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.mixing is not None
        keys = operation_keys(keys, len(self.operations))
        partners = draw_partners(keys, labels >= 0)
        mixed, weights = self.mixing(images, images[partners], keys)
        return mixed, labels[partners], weights

    def check(self, height: int, width: int, key: str = "data.augment") -> None:
        for place, operation in enumerate(self.operations):
            operation.check(height, width, f"{key}.operations.{place}")
            height, width = operation.output_size(height, width)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        for operation in self.operations:
            height, width = operation.output_size(height, width)
        return height, width


def _build(values: Any, key: str) -> Augment | Mixing:
    """An operation, with defaults for the parameters that its mapping lacks."""
    return OPERATIONS.build(OPERATIONS.complete(values) if isinstance(values, Mapping) else values, key=key)


def _options_of(preset: str) -> type:
    """The options of a preset, whose list of operations is that of its YAML file."""

    def operations() -> list[Any]:
        values: Any = OmegaConf.to_container(OmegaConf.load(CONF / "data" / "augment" / f"{preset}.yaml"))
        return list(values["operations"])

    return make_dataclass(preset, [("operations", list[Any], field(default_factory=operations))])


for _preset in PRESETS:
    AUGMENTS.register(_preset, _options_of(_preset))(Compose)
