"""Operations, presets, and images and keys for them."""

from collections.abc import Callable
from typing import Any

import torch
import yaml
from torch import Tensor

from vitmnist.augment.base import OPERATIONS, Mixing, Operation, draw_keys
from vitmnist.augment.preprocess import Compose
from vitmnist.config import CONF
from vitmnist.data.sampler import EpochSampler

NUMBER = 200
PRESETS = sorted(file.stem for file in (CONF / "data" / "augment").glob("*.yaml"))


def built(name: str, **options: object) -> Operation | Mixing:
    return OPERATIONS.build({"name": name, **options})


def operation(name: str, size: tuple[int, int] | None = None, **options: object) -> Callable[[Tensor, Tensor], Tensor]:
    """An operation as a function of images and keys that does not write to the images."""
    module = built(name, **options)
    module.crop_size = size
    return lambda images, keys: module(images.clone(), *module.draw(keys, *images.shape[2:]))


def keys(number: int = NUMBER) -> Tensor:
    return draw_keys(EpochSampler(number, number, 0, "none"), 0, torch.device("cpu"))


def images(number: int = NUMBER, channels: int = 3, height: int = 12, width: int = 17, seed: int = 0) -> Tensor:
    return torch.rand(number, channels, height, width, generator=torch.Generator().manual_seed(seed))


def read_preset(name: str) -> dict[str, Any]:
    """Read the file of `data/augment=NAME`, in much less time than a configuration is composed."""
    return yaml.safe_load((CONF / "data" / "augment" / f"{name}.yaml").read_text())


def preset_of(name: str) -> Compose:
    return Compose(read_preset(name)["operations"])
