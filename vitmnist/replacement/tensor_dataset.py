"""Applies random transforms to decoded images in threads, with the random numbers of a `DataLoader`'s workers.

Only the thread of the training loop draws random numbers, in this order:

1. `iter` draws the base seed from torch's global generator.
2. The sampler draws the indices of the epoch.
3. Worker w would have a generator with the seed base seed + w, and make every `num_workers`-th batch. This generator
   draws the parameters of its transforms, sample by sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from vitmnist.data.sources import collate_with
from vitmnist.errors import ConfigError, DataError, as_data_error
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, DecodedDataset, DeferredBatch
from vitmnist.replacement.original_dataloader import order_depends_on_workers, rebuild
from vitmnist.replacement.split_transforms import PendingResult, SplitTransforms, Transform
from vitmnist.replacement.tensor_transforms import (
    Shape,
    TensorPipeline,
    build_tensor_pipeline,
    draw_parameters,
    get_torchvision_name,
)
from vitmnist.runtime.background_map import BackgroundMap, map_slices
from vitmnist.runtime.random_state import preserve_random_state, seed_generators
from vitmnist.store.samples import EncodedSamples
from vitmnist.store.tree import flatten_tree, map_batch_tensors, replace_leaves

MAX_PIXEL_DIFFERENCE = 8
"""The largest accepted difference from PIL's pixels, in steps of 1/255. Resizing differs by up to 5."""
BATCHES_AHEAD = 2
"""The number of batches that are made ahead of the training loop."""


class ParameterizedImage(NamedTuple):
    """A decoded, read-only image, its transforms with drawn parameters, and the shape of their result."""

    image: Tensor
    transforms: Sequence[Transform]
    shape: Shape
    pipeline: TensorPipeline


@dataclass(frozen=True)
class PendingSample:
    """A sample with drawn parameters. `decoded` is the sample with placeholders for its images."""

    index: int
    decoded: object
    images: Sequence[ParameterizedImage]


class TensorTransformDataset(DecodedDataset):
    """A decoded dataset that draws the parameters of random transforms, and applies the transforms to uint8 tensors."""

    encoded_samples: EncodedSamples

    def __getitems__(self, indices: Sequence[int]) -> DeferredBatch:
        assert self.split_transforms
        return draw_batch(self.encoded_samples, self.split_transforms.random_parts, indices)


def check_supported(dataloader: DataLoader[Any], stages: SplitTransforms) -> None:
    """Raise `ConfigError` unless the random transforms can be applied to tensors. Nothing is decoded."""
    if dataloader.collate_fn is not default_collate:
        raise ConfigError("transforms='tensor' is not for a collate_fn; use transforms='exact'")
    for transforms in stages.random_parts:
        build_tensor_pipeline(transforms)


def apply_to_tensors(exact: DataLoader[Any], stages: SplitTransforms, probes: Sequence[int]) -> DataLoader[Any]:
    """Apply the random transforms to tensors in threads, instead of to PIL images in workers as `exact` does.

    Raises `ConfigError` if the pixels of the samples `probes` differ by more than rounding.
    """
    exact_dataset: Any = exact.dataset
    as_tensors = replace(exact_dataset.encoded_samples, as_tensors=True)
    try:
        check_rounding(stages, probes, exact_dataset.encoded_samples, as_tensors)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    dataset = TensorTransformDataset(exact_dataset.original, stages, encoded_samples=as_tensors)
    return rebuild(exact, ThreadedDataLoader, dataset=dataset)


def draw_batch(samples: EncodedSamples, parts: Sequence[Sequence[Transform]], indices: Sequence[int]) -> DeferredBatch:
    """Draw the parameters of the random transforms of each sample from torch's global generator."""
    pipelines = list(map(build_tensor_pipeline, parts))
    drawn = []
    for index in indices:
        with as_data_error(f"sample {index}"):
            sample, calls, pending = samples.load(index, as_views=True)
            images = [_draw_image(inputs, pipelines[attribute]) for attribute, inputs in calls]
            decoded = replace_leaves(sample, [(position, PendingResult(*result)) for position, *result in pending])
            drawn.append(PendingSample(index, decoded, images))
    # Allocate in the consumer's thread: glibc returns a thread's memory to the system when the thread ends.
    batches = [
        torch.empty((len(drawn), *image.shape), dtype=torch.float32 if image.pipeline.to_float else image.image.dtype)
        for image in drawn[0].images
    ]
    return DeferredBatch(finish_batch, drawn, batches)


def _draw_image(inputs: Any, pipeline: TensorPipeline) -> ParameterizedImage:
    if not isinstance(inputs, tuple) or len(inputs) > 1:
        raise DataError("its transform gets more than an image")
    image = inputs[0].as_subclass(Tensor)
    return ParameterizedImage(image, *draw_parameters(pipeline.transforms, tuple(image.shape)), pipeline)


def finish_batch(samples: Sequence[PendingSample], batches: Sequence[Tensor]) -> object:
    """Apply the drawn transforms in threads, and collate the samples as torch's `default_collate` does.

    The images are written into `batches`, a batch `[B, C, H, W]` for each image of a sample.
    """

    def finish_sample(position: slice) -> None:
        sample = samples[position.start]
        with as_data_error(f"sample {sample.index}"):
            for batch, drawn in zip(batches, sample.images, strict=True):
                _finish_image(drawn, batch[position.start])

    def collate_placeholders(placeholders: Sequence[PendingResult], *, collate_fn_map: object = None) -> Tensor:
        (call,) = {placeholder.call for placeholder in placeholders}
        return batches[call]

    map_slices(finish_sample, len(samples), 1, 1 if get_worker_info() else None)
    return collate_with({PendingResult: collate_placeholders}, [sample.decoded for sample in samples])


def _finish_image(drawn: ParameterizedImage, row: Tensor) -> None:
    image, pipeline = drawn.image, drawn.pipeline
    for transform in drawn.transforms:
        image = transform(image)
    if image.shape != row.shape or not torch.can_cast(image.dtype, row.dtype):
        kinds = " and ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in (image, row))
        raise DataError(f"images of a batch have different shapes or dtypes, {kinds}")
    if pipeline.to_float and not image.is_floating_point():
        pipeline.to_float(image, out=row)
    else:
        row.copy_(image)
    if pipeline.mean_and_std:
        mean, std = pipeline.mean_and_std
        row.sub_(mean.to(row.dtype)).div_(std.to(row.dtype))


def check_rounding(
    stages: SplitTransforms, probes: Sequence[int], as_pil: EncodedSamples, as_tensors: EncodedSamples
) -> None:
    """Raise `DataError` unless random transforms of PIL images and of tensors differ only by rounding.

    The samples `probes` are compared before normalisation.
    """
    parts = [[step for step in part if get_torchvision_name(step) != "Normalize"] for part in stages.random_parts]
    unnormalized = replace(stages, random_parts=parts)
    for index in probes:
        with preserve_random_state():
            seed_generators(0, 0, index)
            expected = default_collate([unnormalized.transform(as_pil.load(index))])
            seed_generators(0, 0, index)
            drawn = draw_batch(as_tensors, parts, [index])
        actual = drawn()
        with as_data_error(f"sample {index}"):
            for leaf, expected_leaf in zip(flatten_tree(actual)[0], flatten_tree(expected)[0], strict=True):
                if isinstance(leaf, Tensor):
                    _check_close(leaf, expected_leaf)


def _check_close(actual: Tensor, expected: Tensor) -> None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise DataError("tensors get another shape or dtype than PIL images")
    scale = 255 if expected.is_floating_point() else 1
    difference = scale * (actual.double() - expected.double()).abs().max().item()
    if difference > MAX_PIXEL_DIFFERENCE:
        raise DataError(
            f"pixels differ by up to {difference:.3g} of 255 from PIL's, and rounding by {MAX_PIXEL_DIFFERENCE} at most"
        )


class ThreadedDataLoader(DecodedDataLoader):
    """Makes the batches of a plain `DataLoader` with the same arguments, in threads instead of workers.

    It has workers if the batches depend on when they read ahead, or on their state.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        needs_workers = not self.in_order or self.worker_init_fn is not None or order_depends_on_workers(self)
        if not self.num_workers or needs_workers or not isinstance(self.dataset, TensorTransformDataset):
            return super().__iter__()
        self.dataset.change_guard.check()
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        drawn = self._draw_batches(self.dataset, base_seed, list(self.batch_sampler or ()))
        return BackgroundMap(self._collate_and_pin, drawn, BATCHES_AHEAD, BATCHES_AHEAD)

    def _draw_batches(
        self, dataset: TensorTransformDataset, base_seed: int, batches: list[list[int]]
    ) -> Iterator[DeferredBatch]:
        """Draw the parameters of each batch with the generator of the worker that would make it."""
        workers = range(self.num_workers)
        states = [torch.Generator().manual_seed(base_seed + worker).get_state() for worker in workers]
        for indices, worker in zip(batches, cycle(workers), strict=False):
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(states[worker])
                drawn = dataset.__getitems__(indices)
                states[worker] = torch.get_rng_state()
            yield drawn

    def _collate_and_pin(self, drawn: DeferredBatch) -> object:
        batch = drawn()
        return map_batch_tensors(Tensor.pin_memory, batch) if self.pin_memory and torch.cuda.is_available() else batch
