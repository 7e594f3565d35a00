"""Decoded images whose random transforms are drawn in order, and applied to the images of a batch in threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from vitmnist.data.randomness import preserved_random_state, seed_generators
from vitmnist.data.sources import collate_with
from vitmnist.errors import DataError, error_context
from vitmnist.replacement.decoded_dataset import DecodedDataset, FetchedBatch
from vitmnist.replacement.split_transforms import SplitTransforms, Transform, TransformPlaceholder, apply_transforms
from vitmnist.replacement.tensor_transforms import (
    Normalize,
    ToFloat,
    draw_parameters,
    tensor_transforms,
    torchvision_name,
)
from vitmnist.replacement.transform_guard import TransformGuard
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import map_slices
from vitmnist.store.read_once import MapStyleDataset
from vitmnist.store.samples import Samples
from vitmnist.store.tree import flatten

TOLERANCE = 8
"""Largest accepted difference from PIL's pixels, in steps of 1/255. Resizing rounds by up to 5."""


class DrawnImage(NamedTuple):
    """A decoded image, not to be changed; its transforms with their parameters; and the shape that they give it."""

    image: Tensor
    steps: Sequence[Transform]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DrawnSample:
    """A sample before its random transforms are applied.

    Args:
        decoded: has placeholders for the images.
    """

    index: int
    decoded: object
    images: Sequence[DrawnImage]


class DrawnDataset(DecodedDataset):
    """Images as uint8 tensors, whose random transforms can all be drawn.

    Args:
        samples: what `SplitTransforms.decode` makes of the samples.
        random: the random transforms of each attribute of the original.
        threads: apply the transforms, at least as many as torch uses; in a worker, one.
    """

    def __init__(
        self,
        original: MapStyleDataset,
        guard: TransformGuard,
        samples: Samples,
        random: Sequence[Sequence[Transform]],
        threads: int,
    ) -> None:
        super().__init__(original, guard, samples.nbytes / len(samples))
        vars(self).update(_samples=samples, _random=random, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> FetchedBatch:
        samples = draw_samples(self._samples, self._random, indices)
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        # Allocated in the consumer's thread: glibc gives up the memory of threads that end with an epoch.
        return FetchedBatch(partial(finish_batch, samples, empty_batches(samples), threads))


def draw_samples(samples: Samples, random: Sequence[Sequence[Transform]], indices: Sequence[int]) -> list[DrawnSample]:
    """Draw the parameters of the random transforms of some samples, from torch's generator."""
    transforms = list(map(tensor_transforms, random))
    drawn = []
    for index in indices:
        with error_context(f"sample {index}"):
            decoded, calls = samples.load(index, as_views=True)
            images = [_draw_image(inputs, transforms[attribute]) for attribute, inputs in calls]
            drawn.append(DrawnSample(index, decoded, images))
    return drawn


def _draw_image(inputs: Any, transforms: Sequence[Transform]) -> DrawnImage:
    if not isinstance(inputs, tuple) or len(inputs) > 1:
        raise DataError("its transform gets more than an image")
    return DrawnImage(inputs[0], *draw_parameters(transforms, tuple(inputs[0].shape)))


def empty_batches(samples: Sequence[DrawnSample]) -> list[Tensor]:
    """A batch for the images of each call of a transform, float32 `[B, C, H, W]`, not filled yet."""
    return [torch.empty((len(samples), *drawn.shape), device="cpu") for drawn in samples[0].images]


def finish_batch(samples: Sequence[DrawnSample], batches: Sequence[Tensor], threads: int) -> object:
    """Apply the transforms of drawn samples in threads, and collate them as torch's `default_collate` does.

    Args:
        batches: those of `empty_batches`. Images are finished in their rows, so that none is copied.
    """
    rows = [list(batch) for batch in batches]
    finished = [list(batch) for batch in batches]

    def finish(positions: slice) -> None:
        for position in range(*positions.indices(len(samples))):
            with error_context(f"sample {samples[position].index}"):
                for call, drawn in enumerate(samples[position].images):
                    finished[call][position] = _finish_image(drawn, rows[call][position])

    def stack(placeholders: Sequence[TransformPlaceholder], *, collate_fn_map: object = None) -> Tensor:
        images = [finished[placeholder.call][position] for position, placeholder in enumerate(placeholders)]
        call = placeholders[0].call
        is_in_rows = all(image is row for image, row in zip(images, rows[call], strict=True))
        return batches[call] if is_in_rows else torch.stack(images)

    map_slices(finish, len(samples), 1, threads)
    return collate_with({TransformPlaceholder: stack}, [sample.decoded for sample in samples])


def _finish_image(drawn: DrawnImage, row: Tensor) -> Tensor:
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


def check_rounding(split: SplitTransforms, images: Samples, tensors: Samples, indices: Sequence[int]) -> None:
    """Raise `DataError` unless random transforms do the same to PIL images and to tensors, apart from rounding.

    Args:
        images: the decoded samples with PIL images.
        tensors: the decoded samples with tensors in their place.
        indices: the samples that are compared, before they are normalised.
    """
    random = [[step for step in steps if torchvision_name(step) != "Normalize"] for steps in split.random]
    with preserved_random_state():
        seed_generators(0, 0, 0)
        all_expected = [default_collate([split.transform(images[index], random)]) for index in indices]
        seed_generators(0, 0, 0)
        drawn = [draw_samples(tensors, random, [index]) for index in indices]
    all_actual = [finish_batch(samples, empty_batches(samples), threads=1) for samples in drawn]
    for index, expected, actual in zip(indices, all_expected, all_actual, strict=True):
        with error_context(f"sample {index}"):
            for leaf, expected_leaf in zip(flatten(actual)[0], flatten(expected)[0], strict=True):
                if isinstance(leaf, Tensor):
                    _check_close(leaf, expected_leaf)


def _check_close(actual: Tensor, expected: Tensor) -> None:
    """Raise `DataError` if two tensors differ by more than rounding; floats are taken as 0 to 1."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise DataError("tensors get another shape or dtype than PIL images")
    scale = 255 if expected.is_floating_point() else 1
    difference = scale * (actual.double() - expected.double()).abs().max().item()
    if difference > TOLERANCE:
        raise DataError(
            f"pixels differ by up to {difference:.3g} of 255 from PIL's, more than the {TOLERANCE} of rounding"
        )
