"""The transforms of a dataset for uint8 tensors: random parameters are drawn in order and applied in threads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.data.sources import collate_with
from vitmnist.errors import DataError, error_context
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Transform, apply, with_results
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts
from vitmnist.store.tree import flatten

TOLERANCE = 3.0
"""Largest mean difference of a batch from that of PIL images, in percent of its range; rounding makes less than 1."""
V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2."
LIKE_V2 = (
    "RandomResizedCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "ColorJitter",
    "RandomErasing",
    "RandomRotation",
)
"""Random transforms that draw the same numbers in v1 and v2."""
RANDOM = ("RandomCrop", *LIKE_V2)
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
"""Deterministic transforms that change shapes."""
SAME_SHAPE = ("ToFloat", "ToImage", "Normalize", "ConvertImageDtype", "ToDtype", "ToPureTensor")
"""Deterministic transforms that keep shapes."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ToFloat:
    """`ToTensor` of a picture that is a uint8 tensor already."""

    def __call__(self, image: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(image, 255, out=out)


@dataclass(frozen=True)
class Normalize:
    """`Normalize` whose result may be written into a row of a batch."""

    mean: Tensor
    std: Tensor

    def __call__(self, image: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sub(image, self.mean.to(image.dtype), out=out).div_(self.std.to(image.dtype))


@dataclass(frozen=True)
class AsV2:
    """A transform of torchvision's v1 as that of v2, which is faster on bytes; reads its attributes in each call."""

    transform: Any

    def __call__(self, image: Tensor) -> Tensor:
        return self.made()(image)  # type: ignore[no-any-return]

    def made(self) -> Any:
        """The transform of v2."""
        from torchvision.transforms import v2

        kind = getattr(v2, type(self.transform).__name__)
        return kind(**{name: getattr(self.transform, name) for name in _parameters(kind)})


@lru_cache
def _parameters(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def tensor_transforms(transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms of a PIL image as transforms of a uint8 tensor."""
    return [step for transform in transforms for step in _of_tensor(transform)]


def _name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module; a user's of the same name may do something else."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith((V1, V2, __name__)) else ""


def _of_tensor(transform: Any) -> list[Transform]:
    name = _name(transform)
    if name == "PILToTensor":
        return []
    if name == "ToTensor":
        return [ToFloat()]
    if name == "Normalize":
        statistics = transform.mean, transform.std
        return [Normalize(*(torch.as_tensor(part).view(-1, 1, 1) for part in statistics))]
    is_v1 = type(transform).__module__ == V1
    return [AsV2(transform) if is_v1 and name in ("Resize", *LIKE_V2) else transform]


def check_rounding(batch: object, expected: object) -> None:
    """Raise `DataError` if a tensor of a batch has another dtype or shape, or differs by more than rounding."""
    for actual, reference in zip_longest(flatten(batch)[0], flatten(expected)[0]):
        kinds = [_kind(actual), _kind(reference)]
        if kinds[0] != kinds[1]:
            raise DataError(f"the batch has {kinds[0]} where that of PIL images has {kinds[1]}")
        if not isinstance(reference, Tensor) or torch.equal(actual, reference):
            continue
        values = reference.double()
        value_range = (values.max() - values.min()).item()
        difference = 100 * (actual.double() - values).abs().mean().item() / max(value_range, 1e-9)
        if difference > TOLERANCE:
            raise DataError(
                f"values differ by {difference:.2g}% of their range from those of PIL images, more than the "
                f"{TOLERANCE:g}% of rounding"
            )


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw` knows the class of a transform; a user's subclass may draw more."""
    base = transform.transform if isinstance(transform, AsV2) else transform
    has_other_shape = any(getattr(base, option, False) for option in ("expand", "pad_if_needed"))
    changes_input = getattr(base, "inplace", False)
    return _name(base) in (*RANDOM, *RESIZING, *SAME_SHAPE) and not (has_other_shape or changes_input)


def draw(transforms: Sequence[Transform], shape: Shape) -> tuple[list[Transform], Shape]:
    """The transforms of a picture with parameters drawn from torch's generator, and the shape that they give it."""
    steps: list[Transform] = []
    for transform in transforms:
        name = _name(transform)
        if name not in RANDOM:
            steps.append(transform)
            shape = tuple(transform(_like(shape).byte()).shape) if name in RESIZING else shape
            continue
        with error_context(f"the transform {name}"):  # a crop may be larger than the picture
            steps += _draw(transform, name, _like(shape))
        if name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)  # type: ignore[attr-defined]
    return steps, shape


def _draw(transform: Any, name: str, like: Tensor) -> list[Transform]:
    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return []
    if type(transform).__module__ == V1:  # the one of v2 draws no number for a side that is not cropped
        return [
            partial(_cropped, transform=transform, box=transform.get_params(_padded(like, transform), transform.size))
        ]
    params = transform.make_params([like])
    if name == "RandomResizedCrop":
        return [partial(_resized_crop, transform=transform, box=tuple(params.values()))]
    return [partial(transform.transform, params=params)]


@lru_cache(maxsize=1024)
def _like(shape: Shape) -> Tensor:
    """What parameters are drawn for: a picture without pixels."""
    return torch.empty(shape, device="meta")


def _padded(image: Tensor, crop: Any) -> Tensor:
    from torchvision.transforms import functional

    if crop.padding is None:
        return image
    return functional.pad(image, crop.padding, crop.fill, crop.padding_mode)  # type: ignore[no-any-return]


def _cropped(image: Tensor, transform: Any, box: Sequence[int]) -> Tensor:
    from torchvision.transforms import functional

    return functional.crop(_padded(image, transform), *box)  # type: ignore[no-any-return]


def _resized_crop(image: Tensor, transform: Any, box: Sequence[int]) -> Tensor:
    """What a `RandomResizedCrop` makes of a box (top, left, height, width) of a picture."""
    from torchvision.transforms.v2 import functional

    top, left, height, width = box
    crop = image[..., top : top + height, left : left + width]
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]


class DrawnPicture(NamedTuple):
    """A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""

    image: Tensor
    steps: Sequence[Transform]
    shape: Shape


DrawnSample = tuple[int, object, list[DrawnPicture]]
"""The index of a sample, the sample with placeholders, and its pictures."""


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each attribute of the original.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, transforms: Sequence[Sequence[Transform]], threads: int) -> None:
        super().__init__(*args)
        vars(self).update(_transforms=transforms, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> DrawnBatch:
        """Draws the random parameters of a batch, from torch's generator."""
        transforms = [[part.made() if isinstance(part, AsV2) else part for part in split] for split in self._transforms]
        samples: list[DrawnSample] = []
        for index in indices:
            with error_context(f"sample {index}"):
                sample, calls = self._samples.load(index, as_views=True)
                pictures = [
                    DrawnPicture(image, *draw(transforms[attribute], tuple(image.shape)))
                    for attribute, (image,) in calls
                ]
                samples.append((index, sample, pictures))
        # In the thread that consumes the batches: glibc returns the memory of threads that end with an epoch.
        batches = [
            torch.empty((len(pictures), *pictures[0].shape), device="cpu")
            for pictures in zip(*(pictures for *_, pictures in samples), strict=True)
        ]
        return DrawnBatch(samples, batches, 1 if get_worker_info() else max(torch.get_num_threads(), self._threads))


class DrawnBatch(FetchedBatch):
    """The samples of a batch before their transforms are applied, in threads.

    Args:
        batches: for the pictures of each call, not filled yet. Pictures are made in their rows, so none is copied.
    """

    def __init__(self, samples: Sequence[DrawnSample], batches: Sequence[Tensor], threads: int) -> None:
        self.samples, self.batches, self.threads = samples, batches, threads

    @property
    def content(self) -> object:
        """The batch, as of torch's `default_collate`."""
        rows_of_calls = [list(batch) for batch in self.batches]
        samples: list[Any] = [None] * len(self.samples)

        def make(span: slice) -> None:
            for position in range(*span.indices(len(samples))):
                index, sample, pictures = self.samples[position]
                with error_context(f"sample {index}"):
                    pairs = zip(pictures, rows_of_calls, strict=True)
                    results = [(_made(picture, rows[position]),) for picture, rows in pairs]
                samples[position] = with_results(sample, results)

        def stack(tensors: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
            for batch, rows in zip(self.batches, rows_of_calls, strict=True):
                if all(row is tensor for row, tensor in zip(rows, tensors, strict=True)):
                    return batch
            return torch.stack(tensors)

        in_parts(make, len(samples), 1, self.threads)
        return collate_with({Tensor: stack}, samples)


def _made(picture: DrawnPicture, row: Tensor) -> Tensor:
    """A picture after its transforms, in a row of the batch if it has the shape and dtype of that."""
    image = picture.image
    for transform in picture.steps:
        fits = isinstance(transform, ToFloat) or (isinstance(transform, Normalize) and image.dtype == row.dtype)
        if fits and image.shape == row.shape:
            image = transform(image, out=row)
        else:
            (image,) = apply([transform], (image,))
    if image is not row and (image.shape, image.dtype) == (row.shape, row.dtype):
        row.copy_(image)
        return row
    return image
