"""The transforms of a dataset for uint8 tensors: random parameters are drawn in order and applied in threads."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.data.images import to_tensor
from vitmnist.data.sources import collate_with
from vitmnist.errors import ConfigError, DataError, described, naming
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Inputs, Transform, apply, with_results
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts

TOLERANCE = 8.0
"""Pixels may differ by so much of 255; resizing alone rounds by up to 5."""
CONVERTING = ("ToTensor", "PILToTensor", "ToImage")
"""Transforms that convert PIL images to tensors."""
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
"""Transforms that change shapes, in a way that is not random."""

SAME_SHAPE = ("ToFloat", "Normalize", "ConvertImageDtype", "ToDtype", "ToPureTensor")

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


def tensor_form(transforms: Sequence[Transform]) -> tuple[list[Transform], int]:
    """The form of some transforms for tensors, and how many of these stand before the conversion to a tensor."""
    names = list(map(_name, transforms))
    position = next((place for place, name in enumerate(names) if name in CONVERTING), len(names))
    steps = list(map(_of_tensor, transforms))
    steps[position : position + 1] = [ToFloat()] if names[position : position + 1] == ["ToTensor"] else []
    return steps, position


def _name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module; a user's of the same name may do something else."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith((V1, V2, __name__)) else ""


def _of_tensor(transform: Any) -> Transform:
    name = _name(transform)
    if name == "Normalize":
        return Normalize(
            *(torch.as_tensor(part, dtype=torch.float64).view(-1, 1, 1) for part in (transform.mean, transform.std))
        )
    is_v1 = type(transform).__module__ == V1
    return AsV2(transform) if is_v1 and name in ("Resize", *LIKE_V2) else transform


def picture_difference(results: Iterable[Inputs], expected_results: Iterable[Inputs]) -> tuple[float, float]:
    """Mean and largest difference, of 255, of pictures as tensors from those of PIL images.

    Args:
        results: what the transforms before the conversion to a tensor make of tensors, for each call.
        expected_results: what they make of PIL images.

    Raises:
        ConfigError: a transform makes other pixels of tensors.
    """
    means, largest = [], 0.0
    for (result, *others), (picture, *_) in zip(results, expected_results, strict=True):
        expected = to_tensor(picture) if isinstance(picture, Image.Image) else picture
        if others or not isinstance(expected, Tensor):
            raise ConfigError("transforms='tensor': is for transforms of one picture; use transforms='exact'")
        if result.shape != expected.shape:
            raise ConfigError("transforms='tensor': the pictures have other sizes than those of PIL images")
        # Of the range 0 to 1, if a transform has made floats already.
        difference = (result.float() - expected.float()).abs() * (255 if expected.is_floating_point() else 1)
        means.append(difference.mean().item())
        largest = max(largest, difference.max().item())
    if largest > TOLERANCE:
        raise ConfigError(
            f"transforms='tensor': pixels differ by up to {largest:.3g} of 255 from those of PIL images, more than the "
            f"{TOLERANCE:g} of rounding; use transforms='exact'"
        )
    return sum(means) / max(len(means), 1), largest


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
        try:
            steps += _draw(transform, name, _like(shape))
        except Exception as error:  # such as a crop that is larger than the picture
            raise DataError(f"the transform {name} cannot be applied: {described(error)}") from error
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


class DrawnSample(NamedTuple):
    """A sample with placeholders for its pictures."""

    sample_index: int
    sample: object
    pictures: list[DrawnPicture]


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each attribute of the original.
        dtype: of a picture after them.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(
        self,
        *args: Any,
        transforms: Sequence[Sequence[Transform]],
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        super().__init__(*args)
        vars(self).update(_transforms=transforms, _dtype=dtype, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> DrawnBatch:
        """Draws the random parameters of a batch, from torch's generator."""
        transforms = [[part.made() if isinstance(part, AsV2) else part for part in split] for split in self._transforms]
        drawn: list[DrawnSample] = []
        for index in indices:
            with naming(f"sample {index}"):
                positions, sample, calls = self._samples.load(index, as_views=True)
                pictures = [
                    DrawnPicture(image, *draw(transforms[position], tuple(image.shape)))
                    for position, (image,) in zip(positions, calls, strict=True)
                ]
                drawn.append(DrawnSample(index, sample, pictures))
        # In the thread that consumes the batches: glibc returns the memory of threads that end with an epoch.
        batches = [
            torch.empty((len(pictures), *pictures[0].shape), dtype=self._dtype, device="cpu")
            for pictures in zip(*(pictures for *_, pictures in drawn), strict=True)
        ]
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        return DrawnBatch(drawn, batches, threads)


@dataclass
class DrawnBatch(FetchedBatch):
    """The samples of a batch before their transforms are applied.

    Args:
        batches: of the pictures of each call, not filled yet: in rows that follow one another, in place of tensors that
            are copied into a batch.
    """

    drawn: list[DrawnSample]
    batches: list[Tensor]
    threads: int

    @property
    def content(self) -> object:
        """The batch, as of torch's `default_collate`."""
        batches = [(batch, list(batch)) for batch in self.batches]

        def stack(tensors: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
            for batch, rows in batches:
                if all(row is tensor for row, tensor in zip(rows, tensors, strict=True)):
                    return batch
            return torch.stack(tensors)

        return collate_with({Tensor: stack}, self._samples([rows for _, rows in batches]))

    def _samples(self, rows: Sequence[Sequence[Tensor]]) -> list[Any]:
        """The samples, whose pictures are the rows of their call if these have their shape and dtype."""
        samples: list[Any] = [None] * len(self.drawn)

        def make(span: slice) -> None:
            for place in range(*span.indices(len(samples))):
                index, sample, pictures = self.drawn[place]
                with naming(f"sample {index}"):
                    results = [(_made(picture, rows[call][place]),) for call, picture in enumerate(pictures)]
                samples[place] = with_results(sample, results)

        in_parts(make, len(samples), 1, self.threads)
        return samples


def _made(picture: DrawnPicture, row: Tensor) -> Tensor:
    """A picture after its transforms, in a row of the batch if it has the shape and dtype of that."""
    image = picture.image
    for transform in picture.steps:
        dtype = torch.get_default_dtype() if isinstance(transform, ToFloat) else image.dtype
        if isinstance(transform, ToFloat | Normalize) and (row.shape, row.dtype) == (image.shape, dtype):
            image = transform(image, out=row)
        else:
            (image,) = apply([transform], (image,))
    return image if image is row or (row.shape, row.dtype) != (image.shape, image.dtype) else row.copy_(image)
