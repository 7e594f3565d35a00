"""Applies the last transforms of a dataset to whole batches, and its random ones to tensors in place of PIL images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, get_worker_info

from vitmnist.data.batch_tensors import find_difference
from vitmnist.data.collate import map_tensors
from vitmnist.data.decoded_dataset import UnfinishedSamples
from vitmnist.data.image_io import to_tensor
from vitmnist.data.samples import BYTES, Samples
from vitmnist.data.seeding import seed_generators
from vitmnist.data.transforms import Halves, Transform, apply
from vitmnist.errors import ConfigError, DataError

CONVERTING = ("ToTensor", "PILToTensor", "ToImage")  # make a tensor of a PIL image
CLOSING = ("ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize")  # do the same for each sample of a batch
PART = 2**19  # values that are finished at a time: they fit into the processor's cache


class ToFloat:
    """`ToTensor` for what is a tensor already: uint8 0 to 255 becomes float 0 to 1."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.to(torch.get_default_dtype()).div_(255)


class ToBytes:
    """`ToTensor` without what `ToFloat` does."""

    def __call__(self, image: Any) -> Tensor:
        if not isinstance(image, Image.Image) or image.mode not in BYTES:
            raise DataError(f"{getattr(image, 'mode', type(image).__name__)} is no picture of mode {', '.join(BYTES)}")
        return to_tensor(image)


@dataclass(frozen=True)
class NormalizeInPlace:
    """`Normalize` after `ToFloat`, whose result is a copy already."""

    transform: Any

    def __call__(self, image: Tensor) -> Tensor:
        from torchvision.transforms.functional import normalize

        return normalize(image, self.transform.mean, self.transform.std, inplace=True)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NativeResize:
    """`Resize` or `RandomResizedCrop` of torchvision's v1 by the functions of v2, with the same random numbers.

    v1 resizes uint8 tensors as floats, which takes three times as long.
    """

    transform: Any

    def __call__(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional

        one = self.transform
        if type(one).__name__ == "Resize":
            return functional.resize(image, one.size, one.interpolation, one.max_size, one.antialias)  # type: ignore[no-any-return]
        box = one.get_params(image, one.scale, one.ratio)
        return functional.resized_crop(image, *box, one.size, one.interpolation, one.antialias)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FinishBatch:
    """Applies transforms to some of the tensors of a batch, by their positions among its values."""

    positions: tuple[int, ...]
    transforms: Sequence[Transform]

    def __call__(self, batch: Any) -> Any:
        values, structure = tree_flatten(batch)
        for position in self.positions:
            values[position] = self._finished(values[position])
        return tree_unflatten(values, structure)

    def _finished(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return apply(self.transforms, (images,))[0]  # type: ignore[no-any-return]
        finished, filled = images, 0
        for part in images.split(max(1, PART * len(images) // max(1, images.numel()))):
            (result,) = apply(self.transforms, (part,))
            if not filled:
                # NumPy asks Linux for huge pages: in pages of 4 KiB, getting the memory takes longer than transforming.
                empty = np.empty(len(images) * result[0].numel() * result.element_size(), np.uint8)
                finished = torch.from_numpy(empty).view(result.dtype).view(len(images), *result.shape[1:])
            finished[filled : filled + len(part)] = result
            filled += len(part)
        return finished


@dataclass(frozen=True)
class CollateFinished:
    """A collate function whose batches are finished.

    Args:
        dataset: of its `UnfinishedSamples`; others are only collated.
    """

    collate: Callable[[Any], Any]
    finish: FinishBatch
    dataset: Any

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, UnfinishedSamples):
            return self.collate(samples)
        batch, worker = self.collate(samples.samples), get_worker_info()
        # Of another dataset, such as a Subset, the batch may be for code within the worker.
        return Unfinished(batch, self.finish) if worker and worker.dataset is self.dataset else self.finish(batch)


@dataclass(frozen=True)
class Unfinished:
    """A batch that is finished where it arrives: a quarter of the bytes leave the worker."""

    batch: Any
    finish: FinishBatch

    def __reduce__(self) -> tuple[FinishBatch, tuple[Any]]:
        return self.finish, (self.batch,)


class DeviceDataLoader(DataLoader[Any]):
    """Moves batches to a device, and finishes them there. `device` and `finish` are set after construction."""

    device: torch.device
    finish: FinishBatch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield self.finish(map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch))


def without_closing(halves: Sequence[Halves], of_tensors: bool) -> tuple[list[Halves], list[int], list[Transform]]:
    """The halves of a dataset without the transforms that whole batches may get.

    Args:
        of_tensors: pictures are uint8 tensors `[C, H, W]`, otherwise they are PIL images.

    Returns:
        The halves, how many transforms of each stand before the conversion to a tensor, and those for whole batches.
    """
    divided = [_divide(half.always, of_tensors) for half in halves]
    if len({repr(closing) for _, _, closing in divided}) > 1:  # a batch may mix samples of several datasets
        divided = [(always + closing, pictorial, []) for always, pictorial, closing in divided]
    closing = divided[0][2] if divided else []
    return [Halves(always=always) for always, _, _ in divided], [pictorial for _, pictorial, _ in divided], closing


def _divide(transforms: list[Transform], of_tensors: bool) -> tuple[list[Transform], int, list[Transform]]:
    names = [type(transform).__name__ for transform in transforms]
    position = next((number for number, name in enumerate(names) if name in CONVERTING), len(names))
    after = transforms[position + 1 :]
    converting = [] if of_tensors else transforms[position : position + 1]
    if names[position : position + 1] == ["ToTensor"]:
        after = [ToFloat(), *after]
        converting = converting and [ToBytes()]
    always = [*(_native(one) if of_tensors else one for one in transforms[:position]), *converting, *after]
    kept = len(always)
    while kept and (type(always[kept - 1]).__name__ in CLOSING or isinstance(always[kept - 1], ToFloat)):
        kept -= 1
    closing = always[kept:]
    if [type(one).__name__ for one in closing[:2]] == ["ToFloat", "Normalize"]:
        closing[1] = NormalizeInPlace(closing[1])
    return always[:kept], min(position, kept), closing


def _native(transform: Transform) -> Transform:
    kind = type(transform)
    is_v1 = kind.__module__ == "torchvision.transforms.transforms"
    return NativeResize(transform) if is_v1 and kind.__name__ in ("Resize", "RandomResizedCrop") else transform


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


def finish_of(batch: Any, finished: Any, closing: Sequence[Transform], tolerance: float) -> FinishBatch:
    """What makes of a batch that lacks the closing transforms one whose samples had them.

    Raises:
        ConfigError: the two differ by more than the tolerance, because the collate function treats them differently.
    """
    pairs = list(zip(tree_flatten(batch)[0], tree_flatten(finished)[0], strict=True))
    positions = tuple(number for number, pair in enumerate(pairs) if find_difference(*pair))
    finish = FinishBatch(positions, closing)
    for found, expected in zip(tree_flatten(finish(batch))[0], tree_flatten(finished)[0], strict=True):
        if isinstance(expected, Tensor) and not torch.allclose(found, expected, 0, tolerance):
            raise ConfigError("transforms='tensor': the collate function changes the pictures; use transforms='exact'")
    return finish
