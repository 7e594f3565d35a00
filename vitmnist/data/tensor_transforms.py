"""Applies the random transforms of a dataset to tensors in place of PIL images, and the last ones to whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from vitmnist.data.batch_tensors import find_difference
from vitmnist.data.collate import map_tensors
from vitmnist.data.image_io import to_tensor
from vitmnist.data.samples import Samples
from vitmnist.data.seeding import seed_generators
from vitmnist.data.transforms import Halves, Transform, apply
from vitmnist.errors import ConfigError, DataError

CONVERTING = ("ToTensor", "PILToTensor", "ToImage")  # make a tensor of a PIL image
CLOSING = ("ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize")  # do the same for each sample of a batch


class ToFloat:
    """`ToTensor` for what is a tensor already: uint8 0 to 255 becomes float 0 to 1."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.to(torch.get_default_dtype()).div(255)


@dataclass(frozen=True)
class FinishBatch:
    """Applies transforms to some of the tensors of a batch, by their positions among its values."""

    positions: tuple[int, ...]
    transforms: Sequence[Transform]

    def __call__(self, batch: Any) -> Any:
        values, structure = tree_flatten(batch)
        for position in self.positions:
            (values[position],) = apply(self.transforms, (values[position],))
        return tree_unflatten(values, structure)


@dataclass(frozen=True)
class CollateFinished:
    """A collate function whose batches are finished."""

    collate: Callable[[Any], Any]
    finish: FinishBatch

    def __call__(self, samples: Any) -> Any:
        return self.finish(self.collate(samples))


class DeviceDataLoader(DataLoader[Any]):
    """Moves batches to a device, and finishes them there. `device` and `finish` are set after construction."""

    device: torch.device
    finish: FinishBatch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield self.finish(map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch))


def for_tensors(halves: Sequence[Halves]) -> tuple[list[Halves], list[int], list[Transform]]:
    """The halves of a dataset for pictures that are uint8 tensors `[C, H, W]`.

    Returns:
        The halves, how many transforms of each stand before the conversion to a tensor, and those for whole batches.
    """
    divided = [_divide(half.always) for half in halves]
    if len({repr(closing) for _, _, closing in divided}) > 1:  # a batch may mix samples of several datasets
        divided = [(always + closing, pictorial, []) for always, pictorial, closing in divided]
    closing = divided[0][2] if divided else []
    return [Halves(always=always) for always, _, _ in divided], [pictorial for _, pictorial, _ in divided], closing


def _divide(transforms: list[Transform]) -> tuple[list[Transform], int, list[Transform]]:
    names = [type(transform).__name__ for transform in transforms]
    position = next((number for number, name in enumerate(names) if name in CONVERTING), len(names))
    after = transforms[position + 1 :]
    if names[position : position + 1] == ["ToTensor"]:
        after = [ToFloat(), *after]
    always = [*transforms[:position], *after]
    kept = len(always)
    while kept and (type(always[kept - 1]).__name__ in CLOSING or isinstance(always[kept - 1], ToFloat)):
        kept -= 1
    return always[:kept], min(position, kept), always[kept:]


def picture_difference(
    halves: Sequence[Halves],
    of_tensors: Sequence[Halves],
    pictorial: Sequence[int],
    samples: Samples,
    indices: list[int],
) -> tuple[float, float]:
    """Mean and largest difference, of 255, of the pictures that the two forms convert to tensors.

    Raises:
        ConfigError: a transform takes no tensor; names it.
    """
    tensors, means, largest = samples.with_tensors(), [], 0.0
    for index in indices:
        (numbers, _, calls), (_, _, calls_of_tensors) = samples[index], tensors[index]
        for number, inputs, inputs_of_tensors in zip(numbers, calls, calls_of_tensors, strict=True):
            seed_generators(0, 0, index)
            (expected,) = apply(halves[number].always[: pictorial[number]], inputs)
            seed_generators(0, 0, index)
            try:
                (found,) = apply(of_tensors[number].always[: pictorial[number]], inputs_of_tensors)
            except DataError as error:
                raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
            expected = to_tensor(expected) if isinstance(expected, Image.Image) else expected
            if found.shape != expected.shape:
                raise ConfigError("transforms='tensor': the pictures have other sizes than those of PIL images")
            difference = (found.float() - expected.float()).abs()
            means.append(difference.mean().item())
            largest = max(largest, difference.max().item())
    return sum(means) / max(len(means), 1), largest


def finish_of(batch: Any, finished: Any, closing: Sequence[Transform]) -> FinishBatch:
    """What makes of a batch that lacks the closing transforms one whose samples had them.

    Raises:
        ConfigError: the collate function treats the two differently.
    """
    pairs = list(zip(tree_flatten(batch)[0], tree_flatten(finished)[0], strict=True))
    positions = tuple(number for number, pair in enumerate(pairs) if find_difference(*pair))
    finish = FinishBatch(positions, closing)
    for found, expected in zip(tree_flatten(finish(batch))[0], tree_flatten(finished)[0], strict=True):
        if isinstance(expected, Tensor) and not torch.allclose(found, expected, atol=1e-5):
            raise ConfigError("transforms='tensor': the collate function changes the pictures; use transforms='exact'")
    return finish
