"""The random transforms of a dataset for uint8 tensors in place of PIL images.

Those of torchvision draw their parameters in the order of the original's workers, and are applied in threads.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle, islice, takewhile
from typing import Any, NamedTuple, NoReturn

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.data.collate import collate_with
from vitmnist.data.images import to_tensor
from vitmnist.data.randomness import preserved_random_state, seed_generators
from vitmnist.errors import DataError, error_context
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Transform, apply, with_results
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import map_slices, ordered_map
from vitmnist.store.samples import Samples
from vitmnist.store.tree import map_tensors

Shape = tuple[int, ...]
AHEAD = 2  # So many batches are made while the script computes.
TOLERANCE = 8  # Pixels may differ by so much of 255 from PIL's; resizing rounds by up to 5.
V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2."
FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")
# These random transforms draw the same numbers in v1 and v2; RandomCrop does not.
LIKE_V2 = ("RandomResizedCrop", *FLIPS, "ColorJitter", "RandomErasing", "RandomRotation")
RANDOM = ("RandomCrop", *LIKE_V2)
# Of the deterministic transforms, some change the shape of a picture, and others keep it.
RESIZING = ("Resize", "CenterCrop", "Pad", "Grayscale")
SAME_SHAPE = ("ToFloat", "ToImage", "Normalize", "ConvertImageDtype", "ToDtype", "ToPureTensor")
CONVERTING = ("ToTensor", "PILToTensor", "ToImage")  # These make a tensor of a PIL image.


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
    """A transform of v1 by its twin of v2, faster on bytes. Each call reads its attributes, because they may change."""

    original: Any

    def __call__(self, image: Tensor) -> Tensor:
        return self.build()(image)  # type: ignore[no-any-return]

    def build(self) -> Any:
        """The transform of v2."""
        from torchvision.transforms import v2

        kind = getattr(v2, type(self.original).__name__)
        return kind(**{name: getattr(self.original, name) for name in _parameters(kind)})


@lru_cache
def _parameters(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def tensor_transforms(transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms of a PIL image as transforms of a uint8 tensor."""
    return [step for transform in transforms for step in _of_tensor(transform)]


def _of_tensor(transform: Any) -> list[Transform]:
    name = _name(transform)
    if name == "PILToTensor":
        return []
    if name == "ToTensor":
        return [ToFloat()]
    if name == "Normalize":
        mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
        return [Normalize(mean, std)]
    is_v1 = type(transform).__module__ == V1
    return [AsV2(transform) if is_v1 and name in ("Resize", *LIKE_V2) else transform]


def _name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module; a user's of the same name may do something else."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith((V1, V2, __name__)) else ""


def check_rounding(
    random: Sequence[Sequence[Transform]], images: Samples, tensors: Samples, indices: Sequence[int]
) -> None:
    """Raise `DataError` if random transforms do anything else to tensors than to PIL images, apart from rounding.

    Pictures are compared before a transform of torchvision converts them; those after it get a tensor in either case.

    Args:
        random: the random transforms of each attribute of the dataset.
        images: its samples with PIL images.
        tensors: its samples with tensors in their place.
        indices: of the samples that are compared.
    """
    of_images = [list(takewhile(lambda step: _name(step) not in CONVERTING, steps)) for steps in random]
    of_tensors = [tensor_transforms(steps) for steps in of_images]
    all_expected = _transform_all(of_images, images, indices)
    all_actual = _transform_all(of_tensors, tensors, indices)
    for (index, attribute, expected), (_, _, actual) in zip(all_expected, all_actual, strict=True):
        is_converted = isinstance(expected, Image.Image) and len(of_images[attribute]) < len(random[attribute])
        with error_context(f"sample {index}"):
            _check_close(actual, to_tensor(expected) if is_converted else expected)


def _transform_all(
    transforms: Sequence[Sequence[Transform]], samples: Samples, indices: Sequence[int]
) -> list[tuple[int, int, Any]]:
    """What transforms make of each picture, after its sample and attribute. All calls draw the same numbers."""
    pictures = []
    with preserved_random_state(transforms):
        seed_generators(0, 0, 0)
        for index in indices:
            with error_context(f"sample {index}"):
                for attribute, inputs in samples[index][1]:
                    if not isinstance(inputs, tuple) or len(inputs) > 1:
                        raise DataError("its transform gets more than a picture")
                    pictures.append((index, attribute, apply(transforms[attribute], inputs)[0]))
    return pictures


def _check_close(actual: Any, expected: Any) -> None:
    """Raise `DataError` unless two tensors are equal apart from rounding; floats are taken as 0 to 1."""
    if not isinstance(expected, Tensor) or _kind(actual) != _kind(expected):
        raise DataError(f"its transforms make {_kind(actual)} of a tensor, and {_kind(expected)} of a PIL image")
    scale = 255 if expected.is_floating_point() else 1
    differences = scale * (actual.double() - expected.double()).abs()
    if (differences > TOLERANCE).any():
        largest = differences.max().item()
        raise DataError(
            f"pixels differ by up to {largest:.3g} of 255 from PIL's, more than the {TOLERANCE} of rounding"
        )


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw` knows the class of a transform; a user's subclass may draw more."""
    original = transform.original if isinstance(transform, AsV2) else transform
    has_other_shape = any(getattr(original, option, False) for option in ("expand", "pad_if_needed"))
    changes_input = getattr(original, "inplace", False)
    return _name(original) in (*RANDOM, *RESIZING, *SAME_SHAPE) and not (has_other_shape or changes_input)


def draw(transforms: Sequence[Transform], shape: Shape) -> tuple[list[Transform], Shape]:
    """The transforms of a picture with parameters drawn from torch's generator, and the shape that they give it."""
    steps: list[Transform] = []
    for transform in transforms:
        name = _name(transform)
        if name not in RANDOM:
            steps.append(transform)
            shape = tuple(transform(_like(shape).byte()).shape) if name in RESIZING else shape
            continue
        with error_context(f"the transform {name}"):  # A crop may be larger than the picture.
            steps += _draw(transform, name, _like(shape))
        if name in ("RandomCrop", "RandomResizedCrop"):
            shape = (shape[0], *transform.size)  # type: ignore[attr-defined]
    return steps, shape


def _draw(transform: Any, name: str, like: Tensor) -> list[Transform]:
    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return []
    if type(transform).__module__ == V1:  # Only RandomCrop: in v2 it draws no number for a side that is not cropped.
        box = transform.get_params(_padded(like, transform), transform.size)
        return [partial(_cropped, transform=transform, box=box)]
    params = transform.make_params([like])
    if name == "RandomResizedCrop":
        return [partial(_resized_crop, transform=transform, box=tuple(params.values()))]
    return [partial(transform.transform, params=params)]


@lru_cache(maxsize=1024)
def _like(shape: Shape) -> Tensor:
    """A picture without pixels, for which parameters are drawn."""
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
    if image.stride(-3) == 1:  # torch resizes bytes in half the time if the channels of a box are last, without gaps.
        crop = crop[None].contiguous(memory_format=torch.channels_last)[0]
    return functional.resize_image(crop, transform.size, transform.interpolation, None, transform.antialias)  # type: ignore[no-any-return]


class DrawnPicture(NamedTuple):
    """A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""

    image: Tensor
    steps: Sequence[Transform]
    shape: Shape


# The index of a sample, the sample with placeholders for its pictures, and these.
DrawnSample = tuple[int, object, list[DrawnPicture]]


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
        transforms = [
            [step.build() if isinstance(step, AsV2) else step for step in steps] for steps in self._transforms
        ]
        samples: list[DrawnSample] = []
        for index in indices:
            with error_context(f"sample {index}"):
                decoded, calls = self._samples.load(index, as_views=True)
                pictures = [
                    DrawnPicture(image, *draw(transforms[attribute], tuple(image.shape)))
                    for attribute, (image,) in calls
                ]
                samples.append((index, decoded, pictures))
        # The consumer's thread allocates the batch: glibc gives up the memory of threads that end with an epoch.
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
        """The batch that torch's `default_collate` makes of the finished samples."""
        rows_of_calls = [list(batch) for batch in self.batches]
        samples: list[Any] = [None] * len(self.samples)

        def make(span: slice) -> None:
            for position in range(*span.indices(len(samples))):
                index, decoded, pictures = self.samples[position]
                with error_context(f"sample {index}"):
                    pairs = zip(pictures, rows_of_calls, strict=True)
                    results = [(_finished(picture, rows[position]),) for picture, rows in pairs]
                samples[position] = with_results(decoded, results)

        def stack(tensors: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
            """`torch.stack`, but tensors that are the rows of a batch already are that batch."""
            for batch, rows in zip(self.batches, rows_of_calls, strict=True):
                if all(row is tensor for row, tensor in zip(rows, tensors, strict=True)):
                    return batch
            return torch.stack(tensors)

        map_slices(make, len(samples), 1, self.threads)
        return collate_with({Tensor: stack}, samples)


def _finished(picture: DrawnPicture, row: Tensor) -> Tensor:
    """A picture after its transforms, in the row of the batch if that has its shape and dtype."""
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


class TensorDataLoader(DecodedDataLoader):
    """Makes batches in threads where torch's generator alone decides what its workers would make.

    A framework that builds another kind of DataLoader from its arguments gets the same batches from workers.
    """

    persistent: tuple[list[Tensor], Iterator[object]] | None = None
    """What persistent workers would continue: the states of their generators, and batches that are not drawn yet."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draws at once what torch draws in this call, from samplers too: the indices that workers get in advance."""
        depends_on_workers = not self.in_order or self.worker_init_fn is not None
        if not self.num_workers or depends_on_workers or not isinstance(self.dataset, DrawnDataset):
            return super().__iter__()
        self.check_transforms()
        sampler: Any = self.batch_sampler or self.sampler
        if self.persistent:
            states, draws = self.persistent
            deque(draws, maxlen=0)  # After a break, persistent workers draw all that they were sent.
        else:
            iter(sampler)  # torch makes an iterator that it does not use before it draws the seed.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            states = [torch.Generator().manual_seed(seed + worker).get_state() for worker in range(self.num_workers)]
        indices = iter(sampler)
        ahead = self.num_workers * (self.prefetch_factor or 0)
        sent = deque(islice(indices, ahead))
        draws = self._draw(states, sent)
        if self.persistent_workers:
            self.persistent = states, draws
        return _deliver(draws, sent, indices, min(AHEAD, ahead - 1))

    def _draw(self, states: list[Tensor], sent: deque[list[int]]) -> Iterator[Callable[[], object]]:
        """Draws the samples of batches as workers would, each with a generator of its own.

        Yields what makes each batch, or raises in its place, until nothing more has been sent.
        """
        dataset: Any = self.dataset
        collate = self._pinned_batch if self.pin_memory and torch.cuda.is_available() else self.collate_fn
        for worker in cycle(range(len(states))):
            if not sent:
                return
            before = torch.get_rng_state()
            torch.set_rng_state(states[worker])
            try:
                with torch.inference_mode(False):  # A batch may be used in another mode than the one before it.
                    make = partial(collate, dataset.__getitems__(sent.popleft()))
            except Exception as error:
                make = partial(_raise, error)
            finally:
                states[worker] = torch.get_rng_state()
                torch.set_rng_state(before)
            yield make

    def _pinned_batch(self, samples: list[Any]) -> object:
        return map_tensors(Tensor.pin_memory, self.collate_fn(samples))


def _deliver(
    draws: Iterator[Callable[[], object]], sent: deque[list[int]], indices: Iterator[list[int]], ahead: int
) -> Generator[object, None, None]:
    """The batches that `draws` makes, in threads; after each, the indices of another one are sent."""
    with closing(ordered_map(lambda make: make(), draws, AHEAD, ahead)) as batches:
        for batch in batches:
            sent.extend(islice(indices, 1))
            yield batch


def _raise(error: Exception) -> NoReturn:
    raise error
