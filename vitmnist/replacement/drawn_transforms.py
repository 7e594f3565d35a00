"""torchvision's random transforms in two steps: parameters are drawn in order, and applied to images in threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.errors import DataError, described, naming
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Transform, apply, with_results
from vitmnist.replacement.tensor_transforms import (
    CONVERTING,
    TRAILING,
    Converted,
    NativeResize,
    Normalized,
    resized_crop,
)
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts

FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")
CROPS = ("RandomCrop", "RandomResizedCrop")
RANDOM = (*FLIPS, *CROPS, "ColorJitter", "RandomErasing", "RandomRotation")
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
"""Transforms that change shapes, in a way that is not random."""
SAME_SHAPE = tuple(name.rpartition(".")[2] for name in (*TRAILING, *CONVERTING))
V2 = "torchvision.transforms.v2."

Shape = tuple[int, ...]


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw` knows the class of a transform; a user's subclass may draw more."""
    base: Any = transform.transform if isinstance(transform, NativeResize) else transform
    if isinstance(base, Converted | Normalized):
        return True
    name = type(base).__name__
    is_torchvisions = type(base).__module__.startswith(("torchvision.transforms.transforms", V2))
    changes_input = name in RANDOM and getattr(base, "inplace", False)
    has_random_shape = name == "RandomRotation" and base.expand
    return is_torchvisions and name in (*RANDOM, *RESIZING, *SAME_SHAPE) and not (changes_input or has_random_shape)


def draw(transforms: Sequence[Transform], shape: Shape) -> tuple[list[Transform], Shape]:
    """The transforms of a picture with parameters drawn from torch's generator, and the shape that they give it."""
    steps: list[Transform] = []
    for transform in transforms:
        base: Any = transform.transform if isinstance(transform, NativeResize) else transform
        name = type(base).__name__
        if name not in RANDOM:
            steps.append(transform)
            shape = _resized(transform, shape) if name in RESIZING else shape
            continue
        try:
            step = (_draw_v2 if type(base).__module__.startswith(V2) else _draw_v1)(base, name, _like(shape))
        except Exception as error:  # such as a crop that is larger than the picture
            raise DataError(f"the transform {name} cannot be applied: {described(error)}") from error
        if step:
            steps.append(step)
        shape = (shape[0], *base.size) if name in CROPS else shape
    return steps, shape


def _draw_v2(transform: Any, name: str, like: Tensor) -> Transform | None:
    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return None
    params = transform.make_params([like])
    if name == "RandomResizedCrop":
        return partial(resized_crop, box=tuple(params.values()), transform=transform)
    return partial(transform.transform, params=params)


def _draw_v1(transform: Any, name: str, like: Tensor) -> Transform | None:
    from torchvision.transforms import functional

    if hasattr(transform, "p") and not torch.rand(1) < transform.p:
        return None
    if name in FLIPS:
        return functional.hflip if name == "RandomHorizontalFlip" else functional.vflip  # type: ignore[no-any-return]
    if name == "RandomResizedCrop":
        box = transform.get_params(like, transform.scale, transform.ratio)
        return partial(resized_crop, box=box, transform=transform)
    if name == "RandomErasing":
        value = [float(transform.value)] if isinstance(transform.value, int | float) else transform.value
        value = None if isinstance(value, str) else value
        *box, content = transform.get_params(like, transform.scale, transform.ratio, value)
        return None if content is like else lambda image: functional.erase(image, *box, content)
    if name == "RandomCrop":
        box = transform.get_params(_padded(like, transform), transform.size)
        return lambda image: functional.crop(_padded(image, transform), *box)
    if name == "ColorJitter":
        order, *factors = transform.get_params(
            transform.brightness, transform.contrast, transform.saturation, transform.hue
        )
        return partial(_adjusted, order=order.tolist(), factors=factors)
    fill = transform.fill if isinstance(transform.fill, Sequence) else [transform.fill] * len(like)
    options = transform.interpolation, transform.expand, transform.center, [float(value) for value in fill]
    angle = transform.get_params(transform.degrees)
    return lambda image: functional.rotate(image, angle, *options)


def _padded(image: Tensor, crop: Any) -> Tensor:
    """A picture as v1's `RandomCrop` pads it before it draws."""
    from torchvision.transforms import functional

    pad = partial(functional.pad, fill=crop.fill, padding_mode=crop.padding_mode)
    if crop.padding is not None:
        image = pad(image, crop.padding)
    height, width = image.shape[-2:]
    if crop.pad_if_needed and width < crop.size[1]:
        image = pad(image, [crop.size[1] - width, 0])
    if crop.pad_if_needed and height < crop.size[0]:
        image = pad(image, [0, crop.size[0] - height])
    return image


def _adjusted(image: Tensor, order: Sequence[int], factors: Sequence[float | None]) -> Tensor:
    """A picture with the factors of a `ColorJitter`, in the order in which v1 has drawn."""
    from torchvision.transforms import functional

    adjust = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    for kind in order:
        image = image if factors[kind] is None else adjust[kind](image, factors[kind])
    return image


@lru_cache(maxsize=1024)
def _like(shape: Shape) -> Tensor:
    """What parameters are drawn for: a picture without pixels."""
    return torch.empty(shape, device="meta")


def _resized(transform: Any, shape: Shape) -> Shape:
    return tuple(transform(_like(shape).byte()).shape)


TO_FLOAT = Converted(to_float=True)

DrawnPicture = tuple[Tensor, Sequence[Transform], Shape]
"""A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each of the dataset's `SplitTransforms`, without the trailing ones.
        dtype: of a picture after the trailing transforms.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, transforms: Sequence[list[Transform]], dtype: torch.dtype, threads: int) -> None:
        super().__init__(*args)
        vars(self).update(_transforms=transforms, _dtype=dtype, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> DrawnSamples:
        """Draws the random parameters of a batch, from torch's generator."""
        drawn: list[tuple[int, Any, list[DrawnPicture]]] = []
        for index in indices:
            with naming(f"sample {index}"):
                positions, sample, calls = self._samples.view(index)
                pictures: list[DrawnPicture] = []
                for position, (image,) in zip(positions, calls, strict=True):
                    pictures.append((image, *draw(self._transforms[position], tuple(image.shape))))
                drawn.append((index, sample, pictures))
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        return DrawnSamples(drawn, self._dtype, threads)


@dataclass
class DrawnSamples(FetchedBatch):
    """The samples of a batch before their transforms are applied.

    Args:
        drawn: the index of each sample, the sample with its placeholders, and what its pictures are made of.
    """

    drawn: list[tuple[int, Any, list[DrawnPicture]]]
    dtype: torch.dtype
    threads: int

    @property
    def content(self) -> list[Any]:
        """The samples without their trailing transforms."""
        return self._made([], [])

    def finished(self, trailing: Sequence[Transform]) -> Any:
        """The batch that torch's `default_collate` makes of the finished samples."""
        # Private, and used by this function alone: how `default_collate` is extended, as its documentation shows.
        from torch.utils.data._utils.collate import collate, default_collate_fn_map

        # In rows that follow one another, in place of tensors that are copied into a batch.
        batches: list[tuple[Tensor, list[Tensor]]] = []
        for pictures in zip(*(pictures for *_, pictures in self.drawn), strict=True):
            batch = torch.empty((len(pictures), *pictures[0][2]), dtype=self.dtype, device="cpu")
            batches.append((batch, list(batch)))

        def stack(rows: list[Tensor], *, collate_fn_map: Any = None) -> Any:
            for batch, batch_rows in batches:
                if all(row is result for row, result in zip(batch_rows, rows, strict=True)):
                    return batch
            return torch.stack(rows)

        samples = self._made(trailing, [rows for _, rows in batches])
        return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})

    def _made(self, trailing: Sequence[Transform], rows: list[list[Tensor]]) -> list[Any]:
        """The samples; with rows for the pictures of each of their calls, they are these if their shapes allow it."""
        samples: list[Any] = [None] * len(self.drawn)

        def make(span: slice) -> None:
            for place in range(*span.indices(len(samples))):
                index, sample, pictures = self.drawn[place]
                with naming(f"sample {index}"):
                    results = []
                    for call, (image, steps, _) in enumerate(pictures):
                        (result,) = apply(steps, (image,))
                        results.append(_finished(result, trailing, rows[call][place] if rows else None))
                samples[place] = with_results(sample, [(result,) for result in results])

        in_parts(make, len(samples), 1, self.threads)
        return samples


def _finished(image: Tensor, trailing: Sequence[Transform], row: Tensor | None) -> Tensor:
    """A picture after its trailing transforms, in a row of the batch if it has the shape and dtype of that."""
    if row is None or image.shape != row.shape:
        return apply(trailing, (image,))[0]  # type: ignore[no-any-return]
    if trailing and trailing[0] == TO_FLOAT and row.dtype == torch.get_default_dtype():
        image, trailing = torch.div(image, 255, out=row), trailing[1:]
    for transform in trailing:
        is_last = isinstance(transform, Normalized) and image.dtype == row.dtype
        image = transform(image, out=row) if is_last else apply([transform], (image,))[0]
    return image if image is row or image.dtype != row.dtype else row.copy_(image)
