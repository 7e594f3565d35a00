"""Random transforms of torchvision in two steps: their parameters are drawn in order, and applied in threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.data.sources import collate_with
from vitmnist.errors import error_context
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Transform, TransformPlaceholder, apply_transforms
from vitmnist.replacement.tensor_transforms import (
    SAME_DRAWS_IN_V2,
    V1,
    Normalize,
    ToFloat,
    tensor_transforms,
    torchvision_name,
)
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import map_slices

Shape = tuple[int, ...]
RANDOM = ("RandomCrop", *SAME_DRAWS_IN_V2)
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
"""Deterministic transforms that change the shape of an image."""
SHAPE_KEEPING = ("ToFloat", "ToImage", "Normalize", "ConvertImageDtype", "ToDtype", "ToPureTensor")


def can_be_drawn(random: Sequence[Sequence[Transform]]) -> bool:
    """Whether `draw_parameters` knows the classes of all transforms; a user's subclass may draw more."""
    return all(map(_can_be_drawn, chain.from_iterable(map(tensor_transforms, random))))


def _can_be_drawn(transform: Transform) -> bool:
    has_other_shape = any(getattr(transform, option, False) for option in ("expand", "pad_if_needed"))
    changes_input = getattr(transform, "inplace", False)
    is_known = torchvision_name(transform) in (*RANDOM, *RESIZING, *SHAPE_KEEPING)
    return is_known and not has_other_shape and not changes_input


def draw_parameters(transforms: Sequence[Transform], shape: Shape) -> list[Transform]:
    """Draw the parameters of the transforms of an image from torch's generator, in torchvision's order.

    Args:
        transforms: those of `tensor_transforms`.
        shape: `[C, H, W]` of the image.

    Returns:
        Deterministic transforms; those that are not applied are left out.
    """
    steps: list[Transform] = []
    for transform in transforms:
        name = torchvision_name(transform)
        with error_context(f"the transform {name}"):  # A crop may be larger than the image.
            steps += _draw(transform, _meta_image(shape)) if name in RANDOM else [transform]
            shape = output_shape([transform], shape)
    return steps


def output_shape(transforms: Sequence[Any], shape: Shape) -> Shape:
    """The shape of an image `[C, H, W]` after transforms."""
    for transform in transforms:
        name = torchvision_name(transform)
        if name in RESIZING:
            shape = tuple(transform(_meta_image(shape)).shape)
        elif name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)
    return shape


def _draw(transform: Any, image: Tensor) -> list[Transform]:
    from torchvision.transforms.v2 import functional

    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return []
    if type(transform).__module__ == V1:  # Only RandomCrop: in v2 it draws no number for a side that is not cropped.
        top, left, height, width = transform.get_params(image, transform.size)
        return [partial(functional.crop, top=top, left=left, height=height, width=width)]
    params = transform.make_params([image])
    if torchvision_name(transform) == "RandomResizedCrop":
        return [partial(_crop_and_resize, transform=transform, **params)]
    return [partial(transform.transform, params=params)]


@lru_cache(maxsize=1024)
def _meta_image(shape: Shape) -> Tensor:
    """An image without memory, for which parameters are drawn."""
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def _crop_and_resize(image: Tensor, transform: Any, top: int, left: int, height: int, width: int) -> Tensor:
    """A box of an image, resized as by a `RandomResizedCrop`."""
    from torchvision.transforms.v2 import functional

    crop = image[..., top : top + height, left : left + width]
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps.
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]


class DrawnImage(NamedTuple):
    """A decoded image, not to be changed, and its transforms with their parameters."""

    image: Tensor
    steps: Sequence[Transform]


@dataclass(frozen=True)
class DrawnSample:
    """A sample before its transforms are applied.

    Args:
        decoded: has placeholders for the images.
    """

    index: int
    decoded: object
    images: Sequence[DrawnImage]


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of images as tensors, whose random transforms can all be drawn.

    Args:
        random: the random transforms of each attribute of the original.
        threads: apply the transforms, at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, random: Sequence[Sequence[Transform]], threads: int) -> None:
        super().__init__(*args)
        vars(self).update(_random=random, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> FetchedBatch:
        """Draw the random parameters of a batch, from torch's generator."""
        transforms = [tensor_transforms(attribute) for attribute in self._random]
        samples: list[DrawnSample] = []
        for index in indices:
            with error_context(f"sample {index}"):
                decoded = self._samples.load(index, as_views=True)
                images = [
                    DrawnImage(image, draw_parameters(transforms[attribute], tuple(image.shape)))
                    for attribute, (image,) in decoded.calls
                ]
                samples.append(DrawnSample(index, decoded.sample, images))
        # Allocated in the consumer's thread: glibc gives up the memory of threads that end with an epoch.
        batches = [
            torch.empty((len(samples), *output_shape(transforms[attribute], tuple(image.shape))), device="cpu")
            for attribute, (image,) in decoded.calls
        ]
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        return FetchedBatch(partial(finish_batch, samples, batches, threads))


def finish_batch(samples: Sequence[DrawnSample], batches: Sequence[Tensor], threads: int) -> object:
    """Apply the transforms of drawn samples, and collate them as torch's `default_collate` does.

    Args:
        batches: for the images of each call of a transform, float32 `[B, C, H, W]`, not filled yet. Images are finished
            in their rows, so that none is copied.
        threads: apply the transforms.
    """
    rows = [list(batch) for batch in batches]
    finished: list[list[Tensor]] = [list(batch) for batch in rows]

    def finish(positions: slice) -> None:
        for position in range(*positions.indices(len(samples))):
            with error_context(f"sample {samples[position].index}"):
                for call, drawn in enumerate(samples[position].images):
                    finished[call][position] = _finish(drawn, rows[call][position])

    def stack(placeholders: Sequence[TransformPlaceholder], *, collate_fn_map: object = None) -> Tensor:
        images = [finished[placeholder.call][position] for position, placeholder in enumerate(placeholders)]
        call = placeholders[0].call
        is_in_rows = all(image is row for image, row in zip(images, rows[call], strict=True))
        return batches[call] if is_in_rows else torch.stack(images)

    map_slices(finish, len(samples), 1, threads)
    return collate_with({TransformPlaceholder: stack}, [sample.decoded for sample in samples])


def _finish(drawn: DrawnImage, row: Tensor) -> Tensor:
    """The transformed image: in the row of the batch if that has its shape and dtype, or else a tensor of its own."""
    image = drawn.image
    for transform in drawn.steps:
        makes_row = isinstance(transform, ToFloat) or (isinstance(transform, Normalize) and image.dtype == row.dtype)
        if makes_row and image.shape == row.shape:
            image = transform(image, out=row)
        else:
            (image,) = apply_transforms([transform], (image,))
    if image is not row and (image.shape, image.dtype) == (row.shape, row.dtype):
        row.copy_(image)
        return row
    return image
