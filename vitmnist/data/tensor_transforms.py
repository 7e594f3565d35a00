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
from vitmnist.data.frozen_state import preserved_own_generators
from vitmnist.data.image_io import to_tensor
from vitmnist.data.samples import Samples
from vitmnist.data.seeding import seed_generators
from vitmnist.data.transforms import Halves, Inputs, Transform, apply
from vitmnist.errors import ConfigError, DataError

# Named with their library: a user's class of the same name may do something else.
TO_FLOAT = ("torchvision.ToTensor", "timm.MaybeToTensor")
CONVERTING = (*TO_FLOAT, "torchvision.PILToTensor", "torchvision.ToImage", "timm.MaybePILToTensor")
CLOSING = tuple(f"torchvision.{name}" for name in ("ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize"))


@dataclass(frozen=True)
class Converted:
    """Converts a picture that is a tensor already; like `ToTensor`, 0 to 255 to float 0 to 1 if `to_float`."""

    to_float: bool

    def __call__(self, image: Tensor) -> Tensor:
        return image.to(torch.get_default_dtype()).div(255) if self.to_float else image


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
        return map(self._finished, super().__iter__())  # draws its seed at once, as the original does

    def _finished(self, batch: Any) -> Any:
        return self.finish(map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch))


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
    names = [f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in transforms]
    position = next((number for number, name in enumerate(names) if name in CONVERTING), len(names))
    always, is_closing = list(transforms), [name in CLOSING for name in names]
    if position < len(names):
        always[position], is_closing[position] = Converted(names[position] in TO_FLOAT), True
    kept = len(always)
    while kept and is_closing[kept - 1]:
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
            end = pictorial[number]
            (expected, *_) = _seeded(halves[number].always[:end], inputs, index)
            try:
                (found, *_) = _seeded(of_tensors[number].always[:end], inputs_of_tensors, index)
            except DataError as error:
                raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
            expected = to_tensor(expected) if isinstance(expected, Image.Image) else expected
            if len(inputs) > 1 or not isinstance(expected, Tensor):
                raise ConfigError("transforms='tensor': is for transforms of one picture; use transforms='exact'")
            if found.shape != expected.shape:
                raise ConfigError("transforms='tensor': the pictures have other sizes than those of PIL images")
            # Of the range 0 to 1, if a transform has made floats already.
            difference = (found.float() - expected.float()).abs() * (255 if expected.is_floating_point() else 1)
            means.append(difference.mean().item())
            largest = max(largest, difference.max().item())
    return sum(means) / max(len(means), 1), largest


def _seeded(transforms: list[Transform], inputs: Inputs, seed: int) -> Inputs:
    with preserved_own_generators(transforms):
        seed_generators(0, 0, seed)
        return apply(transforms, inputs)


def finish_of(closing: Sequence[Transform], batch: Any, finished: Any, exact: Any) -> FinishBatch:
    """What makes of a batch that lacks the closing transforms one whose samples had them.

    Args:
        exact: the batch of PIL images, whose dtypes and shapes the result must have.

    Raises:
        ConfigError: the batches differ.
    """
    pairs = list(zip(tree_flatten(batch)[0], tree_flatten(finished)[0], strict=True))
    positions = tuple(number for number, pair in enumerate(pairs) if find_difference(*pair))
    finish = FinishBatch(positions, closing)
    for found, expected, other in zip(*(tree_flatten(one)[0] for one in (finish(batch), finished, exact)), strict=True):
        if isinstance(other, Tensor) and not (
            (found.dtype, found.shape) == (expected.dtype, expected.shape) == (other.dtype, other.shape)
            and torch.allclose(found, expected, atol=1e-5, equal_nan=True)
        ):
            raise ConfigError(
                "values of the batch differ in dtype, shape or more than rounding from those of PIL images"
            )
    return finish
