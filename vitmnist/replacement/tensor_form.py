"""Applies the last transforms of a dataset to whole batches, and its random ones to tensors in place of PIL images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from torch.utils.data import DataLoader, get_worker_info

from vitmnist.data.collate import map_tensors
from vitmnist.data.difference import find_difference
from vitmnist.data.image_io import to_tensor
from vitmnist.data.seeding import seed_generators
from vitmnist.errors import ConfigError, DataError
from vitmnist.replacement.decoded_dataset import Prepared
from vitmnist.replacement.frozen_state import preserved_own_generators
from vitmnist.replacement.halves import Halves, Inputs, Transform, apply
from vitmnist.replacement.samples import BYTES, Samples

# Named with their library: a user's class of the same name may do something else.
TO_FLOAT = ("torchvision.ToTensor", "timm.MaybeToTensor")
CONVERTING = (*TO_FLOAT, "torchvision.PILToTensor", "torchvision.ToImage", "timm.MaybePILToTensor")
BATCH_DIMS = 4  # of pictures, [B, C, H, W]
TOLERANCE = 8.0  # of 255, by which pixels may differ: resizing alone rounds by up to 5
PART = 2**19  # values that are finished at a time: they fit into the processor's cache
CLOSING = tuple(f"torchvision.{name}" for name in ("ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize"))


@dataclass(frozen=True)
class Converted:
    """Converts a picture that is a tensor already; like `ToTensor`, 0 to 255 to float 0 to 1 if `to_float`."""

    to_float: bool

    def __call__(self, image: Tensor) -> Tensor:
        return image.div(255) if self.to_float else image


class ToBytes:
    """`ToTensor` without the conversion to float, which `Converted` does."""

    def __call__(self, image: Any) -> Tensor:
        if not isinstance(image, Image.Image) or image.mode not in BYTES:
            raise DataError(f"{getattr(image, 'mode', type(image).__name__)} is no picture of mode {', '.join(BYTES)}")
        return to_tensor(image)


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
class Normalized:
    """`Normalize` with constants that stay on the device; torchvision's copies them there and waits in each batch."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        mean, std = _on_device((self.mean, self.std), images.dtype, images.device)
        return images.sub(mean).div_(std)


@lru_cache(maxsize=16)
def _on_device(numbers: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(one, dtype=dtype, device=device).view(-1, 1, 1) for one in numbers)


@dataclass(frozen=True)
class FinishBatch:
    """Applies transforms to some of the tensors of a batch, by their paths in it, such as `['image']`."""

    paths: frozenset[str]
    transforms: Sequence[Transform]

    def __call__(self, batch: Any) -> Any:
        pairs, structure = tree_flatten_with_path(batch)
        values = [self._finished(value) if keystr(path) in self.paths else value for path, value in pairs]
        return tree_unflatten(values, structure)

    def _finished(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return apply(self.transforms, (images,))[0]  # type: ignore[no-any-return]
        finished, filled = images, 0
        for part in images.split(max(1, PART * len(images) // max(1, images.numel()))):
            (result,) = apply(self.transforms, (part,))
            if not filled:
                finished = result.new_empty((len(images), *result.shape[1:]))
            finished[filled : filled + len(part)] = result
            filled += len(part)
        return finished


@dataclass(frozen=True)
class CollateFinished:
    """A collate function that applies the last transforms of the samples to the whole batch.

    Args:
        dataset: whose samples lack their last transforms; others are only collated.
    """

    collate: Callable[[Any], Any]
    finish: FinishBatch
    dataset: Any

    def unfinished(self, samples: Any) -> Any:
        """The batch without the last transforms."""
        return self.collate(samples.content)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, Prepared):
            return self.collate(samples)
        batch, worker = self.unfinished(samples), get_worker_info()
        # With another dataset, such as a Subset, code in the worker may use the batch.
        return Unfinished(batch, self.finish) if worker and worker.dataset is self.dataset else self.finish(batch)


@dataclass(frozen=True)
class Unfinished:
    """A batch that is finished when it is unpickled, so that only a quarter of the bytes leave the worker."""

    batch: Any
    finish: FinishBatch

    def __reduce__(self) -> tuple[FinishBatch, tuple[Any]]:
        return self.finish, (self.batch,)


class DeviceDataLoader(DataLoader[Any]):
    """Moves batches to `device`, which is set after construction, and finishes them there.

    A framework that builds another DataLoader from its arguments gets finished batches on the host.
    """

    device: torch.device | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        collate: Any = self.collate_fn
        if self.device is None:
            return super().__iter__()
        self.collate_fn = collate.unfinished
        try:
            batches = super().__iter__()  # draws its seed at once, as the original does
        finally:
            self.collate_fn = collate
        return (collate.finish(map_tensors(self._to_device, batch)) for batch in batches)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


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
    names = [f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in transforms]
    position = next((number for number, name in enumerate(names) if name in CONVERTING), len(names))
    always = [_native(one) if of_tensors else one for one in transforms]
    is_closing = [name in CLOSING for name in names]
    if of_tensors and position < len(names):
        always[position], is_closing[position] = Converted(names[position] in TO_FLOAT), True
    elif names[position : position + 1] == ["torchvision.ToTensor"]:
        always[position : position + 1] = [ToBytes(), Converted(to_float=True)]
        is_closing[position : position + 1] = [False, True]
    kept = len(always)
    while kept and is_closing[kept - 1]:
        kept -= 1
    closing = [_without_waits(one) if of_tensors else one for one in always[kept:]]
    return always[:kept], min(position, kept), closing


def _without_waits(transform: Any) -> Transform:
    if type(transform).__name__ != "Normalize":
        return transform  # type: ignore[no-any-return]
    mean, std = (tuple(torch.as_tensor(one).view(-1).tolist()) for one in (transform.mean, transform.std))
    return Normalized(mean, std)


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
        ConfigError: a transform takes no tensor, or makes other pixels of it.
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
    if largest > TOLERANCE:
        raise ConfigError(
            f"transforms='tensor': pixels differ by up to {largest:.3g} of 255 from those of PIL images, more than the "
            f"{TOLERANCE:g} of rounding; use transforms='exact'"
        )
    return sum(means) / max(len(means), 1), largest


def _seeded(transforms: list[Transform], inputs: Inputs, seed: int) -> Inputs:
    with preserved_own_generators(transforms):
        seed_generators(0, 0, seed)
        return apply(transforms, inputs)


def finish_of(closing: Sequence[Transform], batch: Any, finished: Any, exact: Any, of_tensors: bool) -> FinishBatch:
    """The `FinishBatch` that applies the closing transforms to a batch of samples without them.

    Args:
        batch: of samples without the closing transforms.
        finished: of samples with them.
        exact: the original's batch; the result must have its dtypes and shapes, and without `of_tensors` its values.

    Raises:
        ConfigError: the batches differ.
    """
    pairs = list(zip(tree_flatten_with_path(batch)[0], tree_flatten(finished)[0], strict=True))
    differing = {keystr(path): value for (path, value), other in pairs if find_difference(value, other)}
    if any(value.dim() != BATCH_DIMS for value in differing.values()):
        raise ConfigError("the collate function does not stack the pictures")
    finish = FinishBatch(frozenset(differing), closing)
    if not of_tensors and find_difference(finish(batch), exact):
        raise ConfigError("values of the batch differ")
    for found, expected, other in zip(*(tree_flatten(one)[0] for one in (finish(batch), finished, exact)), strict=True):
        if isinstance(other, Tensor) and not (
            (found.dtype, found.shape) == (expected.dtype, expected.shape) == (other.dtype, other.shape)
            and torch.allclose(found, expected, atol=1e-5, equal_nan=True)
        ):
            raise ConfigError(
                "values of the batch differ in dtype, shape or more than rounding from those of PIL images"
            )
    return finish
