"""The transforms of a dataset for uint8 tensors: random parameters are drawn in order and applied in threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from vitmnist.data.images import to_tensor
from vitmnist.data.randomness import preserved_random_state, seed_generators
from vitmnist.errors import ConfigError, DataError, described, naming
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Inputs, SplitTransforms, Transform, apply, with_results
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts
from vitmnist.store.samples import Samples
from vitmnist.store.tree import flatten

TOLERANCE = 8.0
"""Pixels may differ by so much of 255; resizing alone rounds by up to 5."""
CONVERTING = ("ToTensor", "PILToTensor", "ToImage")
"""Transforms that convert PIL images to tensors."""
TRAILING = ("ToFloat", "Normalized", "ConvertImageDtype", "ToDtype", "ToPureTensor", "Normalize")
"""Transforms of single values, which a batch may get as well as a picture."""
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

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ToFloat:
    """`ToTensor` of a picture that is a uint8 tensor already."""

    def __call__(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(images, 255, out=out)


@dataclass(frozen=True)
class Normalized:
    """`Normalize` with constants that stay on the device; torchvision's copies them there and waits in each batch."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        mean, std = _on_device((self.mean, self.std), images.dtype, images.device)
        return torch.sub(images, mean, out=out).div_(std)


@lru_cache(maxsize=16)
def _on_device(numbers: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(part, dtype=dtype, device=device).view(-1, 1, 1) for part in numbers)


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


class TensorForm(NamedTuple):
    """The random transforms of a dataset for tensors in place of PIL images.

    Args:
        pictorial: those of `kept` that stand before the conversion to a tensor.
        kept: without the trailing ones.
        trailing: those at the end, which whole batches may get.
    """

    pictorial: list[Transform]
    kept: list[Transform]
    trailing: list[Transform]


def tensor_form(transforms: Sequence[Transform]) -> TensorForm:
    """The form of some transforms for tensors."""
    names = list(map(_name, transforms))
    position = next((place for place, name in enumerate(names) if name in CONVERTING), len(names))
    steps = list(map(_of_tensor, transforms))
    steps[position : position + 1] = [ToFloat()] if names[position : position + 1] == ["ToTensor"] else []
    kept = len(steps)
    while kept and _name(steps[kept - 1]) in TRAILING:
        kept -= 1
    return TensorForm(steps[: min(position, kept)], steps[:kept], steps[kept:])


def _name(transform: Transform) -> str:
    """The name of a class of torchvision or of this module; a user's of the same name may do something else."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith((V1, V2, __name__)) else ""


def _of_tensor(transform: Any) -> Transform:
    name = _name(transform)
    if name == "Normalize":
        mean, std = (tuple(torch.as_tensor(part).view(-1).tolist()) for part in (transform.mean, transform.std))
        return Normalized(mean, std)
    is_v1 = type(transform).__module__ == V1
    return AsV2(transform) if is_v1 and name in ("Resize", *LIKE_V2) else transform


def picture_difference(
    splits: Sequence[SplitTransforms], forms: Sequence[TensorForm], samples: Samples, probes: Sequence[int]
) -> tuple[float, float]:
    """Mean and largest difference, of 255, of the pictures that the transforms and their form convert to tensors.

    Args:
        samples: kept as PIL images.
        probes: indices of those that are compared.

    Raises:
        ConfigError: a transform takes no tensor, or makes other pixels of it.
    """
    tensors, means, largest = samples.with_tensors(), [], 0.0
    for index in probes:
        (positions, _, calls), (_, _, tensor_calls) = samples[index], tensors[index]
        for position, inputs, tensor_inputs in zip(positions, calls, tensor_calls, strict=True):
            pictorial = forms[position].pictorial
            (expected, *_) = _seeded(splits[position].random[: len(pictorial)], inputs, index)
            expected = to_tensor(expected) if isinstance(expected, Image.Image) else expected
            if len(inputs) > 1 or not isinstance(expected, Tensor):
                raise ConfigError("transforms='tensor': is for transforms of one picture; use transforms='exact'")
            try:
                (result,) = _seeded(pictorial, tensor_inputs, index)
            except DataError as error:
                raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
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


def _seeded(transforms: list[Transform], inputs: Inputs, seed: int) -> Inputs:
    with preserved_random_state(transforms):
        seed_generators(0, 0, seed)
        return apply(transforms, inputs)


def can_be_drawn(transform: Transform) -> bool:
    """Whether `draw` knows the class of a transform; a user's subclass may draw more."""
    base = transform.transform if isinstance(transform, AsV2) else transform
    has_other_shape = any(getattr(base, option, False) for option in ("expand", "pad_if_needed"))
    changes_input = getattr(base, "inplace", False)
    return _name(base) in (*RANDOM, *RESIZING, *TRAILING) and not (has_other_shape or changes_input)


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
    """A sample with placeholders for its pictures.

    Args:
        name: for errors.
    """

    name: str
    sample: object
    pictures: list[DrawnPicture]


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        forms: of each of the dataset's `SplitTransforms`.
        dtype: of a finished picture.
        collate: the collate function of the original.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(
        self,
        *args: Any,
        forms: Sequence[TensorForm],
        dtype: torch.dtype,
        collate: Callable[[list[object]], object],
        threads: int,
    ) -> None:
        super().__init__(*args)
        vars(self).update(_forms=forms, _dtype=dtype, collate=collate, _threads=min(threads, available_cores()))

    @property
    def trailing(self) -> list[Transform]:
        """Transforms that whole batches may get."""
        return self._forms[0].trailing if self._forms else []

    def __getitems__(self, indices: Sequence[int]) -> DrawnBatch:
        """Draws the random parameters of a batch, from torch's generator."""
        kept = [[step.made() if isinstance(step, AsV2) else step for step in form.kept] for form in self._forms]
        drawn: list[DrawnSample] = []
        for index in indices:
            with naming(f"sample {index}"):
                positions, sample, calls = self._samples.view(index)
                pictures = [
                    DrawnPicture(image, *draw(kept[position], tuple(image.shape)))
                    for position, (image,) in zip(positions, calls, strict=True)
                ]
                drawn.append(DrawnSample(f"sample {index}", sample, pictures))
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        return DrawnBatch(drawn, self.trailing, self._dtype, self.collate, threads)


@dataclass
class DrawnBatch(FetchedBatch):
    """The samples of a batch before their transforms are applied.

    Args:
        trailing: transforms of each picture, or of a batch of them.
    """

    drawn: list[DrawnSample]
    trailing: Sequence[Transform]
    dtype: torch.dtype
    collate: Callable[[list[Any]], Any]
    threads: int

    @property
    def content(self) -> Any:
        """The finished batch."""
        if self.collate is default_collate:
            calls = zip(*(pictures for *_, pictures in self.drawn), strict=True)
            # In rows that follow one another, in place of tensors that are copied into a batch.
            batches = [torch.empty((len(call), *call[0].shape), dtype=self.dtype, device="cpu") for call in calls]
            return self._collated(self.trailing, batches)[0]
        return self.collate(self._samples(self._results(self.trailing)))

    def unfinished(self) -> tuple[Any, list[int]]:
        """The batch, and which of its leaves lack the trailing transforms: none, if a function of the user collates."""
        if self.collate is not default_collate:
            return self.content, []
        batch, pictures = self._collated([])
        leaves = enumerate(flatten(batch)[0])
        return batch, [position for position, leaf in leaves if any(leaf is picture for picture in pictures)]

    def _collated(self, trailing: Sequence[Transform], batches: Sequence[Tensor] = ()) -> tuple[Any, list[Tensor]]:
        """The batch that torch's `default_collate` makes of the samples, and those of its tensors that are pictures.

        Args:
            batches: whose rows the pictures of each call are written into, where these have their shape and dtype.
        """
        # Private, and used by this function alone: how `default_collate` is extended, as its documentation shows.
        from torch.utils.data._utils.collate import collate, default_collate_fn_map

        rows = list(map(list, batches))
        results = self._results(trailing, rows)
        pictures: list[Tensor] = []

        def stack(values: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
            call = next((position for position, result in enumerate(results[0]) if result is values[0]), None)
            if call is None:
                return torch.stack(values)
            is_written = bool(rows) and all(value is row for value, row in zip(values, rows[call], strict=True))
            pictures.append(batches[call] if is_written else torch.stack(values))
            return pictures[-1]

        batch = collate(self._samples(results), collate_fn_map={**default_collate_fn_map, Tensor: stack})
        return batch, pictures

    def _samples(self, results: list[list[Tensor]]) -> list[Any]:
        pairs = zip(self.drawn, results, strict=True)
        return [with_results(drawn.sample, [(result,) for result in pictures]) for drawn, pictures in pairs]

    def _results(self, trailing: Sequence[Transform], rows: Sequence[Sequence[Tensor]] = ()) -> list[list[Tensor]]:
        """The pictures of each sample, in rows of a batch where there are some."""
        results: list[list[Tensor]] = [[] for _ in self.drawn]

        def make(span: slice) -> None:
            for place in range(*span.indices(len(results))):
                name, _, pictures = self.drawn[place]
                with naming(name):
                    for call, (image, steps, _) in enumerate(pictures):
                        (result,) = apply(steps, (image,))
                        results[place].append(_finished(result, trailing, rows[call][place] if rows else None))

        in_parts(make, len(results), 1, self.threads)
        return results


def _finished(image: Tensor, trailing: Sequence[Transform], row: Tensor | None) -> Tensor:
    """A picture after its trailing transforms, in a row of the batch if it has the shape and dtype of that."""
    if row is None or image.shape != row.shape:
        return apply(trailing, (image,))[0]  # type: ignore[no-any-return]
    for transform in trailing:
        dtype = torch.get_default_dtype() if isinstance(transform, ToFloat) else image.dtype
        if isinstance(transform, ToFloat | Normalized) and row.dtype == dtype:
            image = transform(image, out=row)
        else:
            (image,) = apply([transform], (image,))
    return image if image is row or image.dtype != row.dtype else row.copy_(image)
