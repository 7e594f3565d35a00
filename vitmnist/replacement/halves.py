"""Divides the transforms of a dataset at the first random one: what comes before it needs to be applied only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vitmnist.data.seeding import changed_generators, generator_states, preserved_generators, seed_generators
from vitmnist.errors import DataError, described, naming
from vitmnist.replacement.frozen_state import preserved_own_generators
from vitmnist.store.difference import find_difference
from vitmnist.store.tree import tree_map

Transform = Callable[..., Any]
Inputs = Any
"""The arguments of a transform, a tuple: an image, or for a joint transform an image and its target; or a dict by name.
"""
# Random transforms of torchvision and timm whose names do not begin with Random.
RANDOM = (
    *("AugMix", "AugMixAugment", "AutoAugment", "ColorJitter", "ElasticTransform", "GaussianBlur", "GaussianNoise"),
    *("JPEG", "RandAugment", "ScaleJitter", "TrivialAugmentWide"),
)

ADVICE = "name the two steps with decode= and transform="


@dataclass
class Halves:
    """The transforms of a dataset in order: those before the first random one, and the others."""

    once: list[Transform] = field(default_factory=list)
    always: list[Transform] = field(default_factory=list)

    def divide(self, samples: list[Inputs]) -> None:
        """Move transforms from `always` to `once` up to the first that is random for any of the samples."""
        if len(self.always) == 1:
            self.always = unwrap(self.always[0], samples)
        while self.always and not any(is_random(self.always[0], inputs) for inputs in samples):
            self.once.append(self.always.pop(0))
            samples = [apply(self.once[-1:], inputs) for inputs in samples]


class Output(NamedTuple):
    """Placeholder in a sample for a result of its transforms: the number of the call, number or name of the result."""

    call: int
    result: int | str


class DividedDataset(Dataset[Any]):
    """A dataset whose samples are made in two steps: its own `[index]` decodes one, and `transform` completes it.

    The transforms are the attributes `transform` and `transforms` of the dataset, or if it has none, of the datasets in
    its attributes, such as those of a `Subset` or `ConcatDataset`. A target's transform belongs to the first step.

    Args:
        probes: indices of samples on which the transforms are tried.

    Raises:
        DataError: a sample cannot be divided.
    """

    def __init__(self, dataset: Any, probes: Sequence[int]) -> None:
        self._dataset, self._size = dataset, len(dataset)
        self._places = list(places(dataset))
        self.halves = [Halves(always=flatten(vars(owner)[name])) for owner, name in self._places]
        self._calls: list[tuple[int, Inputs]] = []
        samples: dict[int, list[Inputs]] = {}
        for index in probes:
            numbers, _, calls = self[index]
            for number, inputs in zip(numbers, calls, strict=True):
                samples.setdefault(number, []).append(inputs)
        for number, inputs_of_half in samples.items():
            if isinstance(inputs_of_half[0], dict):  # such a Compose converts arguments and results
                owner, name = self._places[number]
                self.halves[number] = Halves(always=[vars(owner)[name]])
            with naming(f"one of the samples {', '.join(map(str, probes))}"):
                self.halves[number].divide(inputs_of_half)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        """A decoded sample: (index into `halves` of each call, the sample with each `Output`, inputs of each call)."""
        self._calls.clear()
        try:
            with self._recording():
                sample = self._dataset[index]
        except Exception as error:
            with naming(f"sample {index}"):
                self._dataset[index]
                raise DataError(
                    f"its dataset uses its transform, or what that returns ({described(error)}); {ADVICE}"
                ) from error
        return [number for number, _ in self._calls], sample, [inputs for _, inputs in self._calls]

    def transform(self, decoded: Any, halves: Sequence[Halves] | None = None) -> Any:
        """The sample that the original dataset would have made; with other transforms if there are `halves`."""
        numbers, sample, calls = decoded
        halves = self.halves if halves is None else halves
        results = [apply(halves[number].always, inputs) for number, inputs in zip(numbers, calls, strict=True)]
        return completed(sample, results)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Replace the dataset's transforms by `_record` for a while."""
        before = [vars(owner)[name] for owner, name in self._places]
        try:
            for number, (owner, name) in enumerate(self._places):
                vars(owner)[name] = partial(self._record, number)
            yield
        finally:
            for (owner, name), transform in zip(self._places, before, strict=True):
                vars(owner)[name] = transform

    def _record(self, number: int, *inputs: Any, **named: Any) -> Any:
        if inputs and named:
            raise TypeError("its transform gets arguments with and without names")
        call = len(self._calls)
        decoded = apply(self.halves[number].once, named or inputs)
        for value in decoded.values() if isinstance(decoded, dict) else decoded:
            if isinstance(value, Image.Image):
                value.load()  # while its file is open
        self._calls.append((number, decoded))
        if named:
            return {name: Output(call, name) for name in named}
        outputs = tuple(Output(call, result) for result in range(len(inputs)))
        return outputs if len(outputs) > 1 else outputs[0]


def completed(sample: Any, results: Sequence[Any]) -> Any:
    """A sample with the results of its calls in place of each `Output`."""

    def result(value: Any) -> Any:
        return results[value.call][value.result] if isinstance(value, Output) else value

    return tree_map(result, sample, leaf_type=Output)


def find_random_transform(dataset: Any) -> str | None:
    """A transform of a dataset that is random by its class, even if most samples do not show it."""
    transforms = [one for owner, name in places(dataset) for one in flatten(vars(owner)[name])]
    return next((f"the transform {type(one).__name__}" for one in transforms if _is_random_class(one)), None)


def places(dataset: Any) -> Iterator[tuple[Any, str]]:
    """The objects that hold the transforms of a dataset, and the names of their attributes."""
    own = getattr(dataset, "__dict__", {})
    joint = own.get("transforms")
    has_pair = hasattr(joint, "target_transform")  # torchvision's transforms of an image and of its target
    found = [(dataset, "transform"), *[(joint, "transform") if has_pair else (dataset, "transforms")]]
    found = [(owner, name) for owner, name in found if callable(getattr(owner, "__dict__", {}).get(name))]
    yield from found
    for value in own.values() if not found else ():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Dataset):
                yield from places(part)


def flatten(transform: Transform) -> list[Transform]:
    """The transforms of a `Compose` or `nn.Sequential`, nested ones too, in order."""
    if isinstance(transform, nn.Sequential):
        parts = list(transform)
    elif type(transform).__name__ == "Compose" and isinstance(getattr(transform, "transforms", None), list | tuple):
        parts = list(transform.transforms)  # type: ignore[attr-defined]
    else:
        return [transform]
    return [one for part in parts for one in flatten(part)]


def unwrap(transform: Transform, samples: Sequence[Inputs]) -> list[Transform]:
    """The transforms of a wrapper such as a preset, if they alone give the same results; otherwise the wrapper."""
    content = list(getattr(transform, "__dict__", {}).values())
    if len(content) != 1 or not callable(content[0]) or not samples:
        return [transform]
    parts = flatten(content[0])
    with preserved_generators(), preserved_own_generators(transform):
        results = []
        for transforms in ([transform], parts):
            seed_generators(0, 0, 0)
            try:
                results.append([apply(transforms, deepcopy(inputs)) for inputs in samples])
            except DataError:
                return [transform]
    return [transform] if find_difference(*results) else parts


def apply(transforms: Sequence[Transform], inputs: Inputs) -> Inputs:
    """Apply transforms one after another."""
    for transform in transforms:
        try:
            if isinstance(inputs, dict):
                inputs = transform(**inputs)
                continue
            result = transform(*inputs)
            if len(inputs) > 1 and not (isinstance(result, tuple | list) and len(result) == len(inputs)):
                raise TypeError(f"it gets {len(inputs)} arguments and does not return as many results; {ADVICE}")
            inputs = tuple(result) if len(inputs) > 1 else (result,)
        except Exception as error:
            name = getattr(transform, "__name__", type(transform).__name__)
            raise DataError(f"the transform {name} cannot be applied: {described(error)}") from error
    return inputs


def is_random(transform: Transform, inputs: Inputs) -> bool:
    """Whether a transform is random by its class, uses a random generator, or gives two results for the same inputs.

    It tries a copy, because a transform may keep state.
    """
    if _is_random_class(transform):
        return True
    trial = deepcopy(transform)
    with preserved_generators(), preserved_own_generators(trial) as own_changed:
        before = generator_states()
        results = [apply([trial], deepcopy(inputs)) for _ in range(2)]
        return bool(changed_generators(before) or own_changed() or find_difference(*results))


def _is_random_class(transform: Transform) -> bool:
    return any(kind.__name__.startswith("Random") or kind.__name__ in RANDOM for kind in type(transform).__mro__)
