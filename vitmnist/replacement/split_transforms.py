"""Splits the transforms of a dataset at the first random one: those before it need to be applied only once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from types import MethodType
from typing import Any, NamedTuple

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vitmnist.data.randomness import detect_randomness, preserved_random_state, read_probes
from vitmnist.errors import ConfigError, DataError, describe_error, error_context
from vitmnist.store.tree import copy_tree, tree_map

Transform = Callable[..., Any]
# The arguments of a transform, a tuple: an image, or for a joint transform an image and its target; or a dict by name.
Inputs = Any
Call = tuple[int, Inputs]  # The number of the attribute whose transform was called, and what it got.
DecodedSample = tuple[object, list[Call]]  # A sample with placeholders for the results of its calls, and the calls.
ADVICE = "leave all that follows to its attribute transform"


class TransformPlaceholder(NamedTuple):
    """Stands in a decoded sample for a result of a transform.

    Args:
        call: number of the call of a transform within the sample.
        result: position or name of the result in the call.
    """

    call: int
    result: int | str


class SplitTransforms:
    """Makes the samples of a dataset in two steps: `decode` applies deterministic transforms, `transform` the others.

    The transforms are the attributes `transform` and `transforms` of the dataset, or if it has none, of the datasets in
    its attributes, as in a `Subset` or `ConcatDataset`. They are split at the first random one. A target's
    transform belongs to the first step.

    Args:
        probes: indices of samples on which the transforms are tried.

    Attributes:
        probed: the decoded samples of `probes`.
        deterministic: transforms of the first step, for each attribute.
        random: transforms of the second step, for each attribute.

    Raises:
        DataError: a sample cannot be split.
        RandomSampleError: a sample is random before its transforms.
    """

    def __init__(self, dataset: Any, probes: Sequence[int]) -> None:
        self._dataset = dataset
        self._attributes = list(transform_attributes(dataset))
        self.random = [single_transforms(vars(owner)[name]) for owner, name in self._attributes]
        self.deterministic: list[list[Transform]] = [[] for _ in self._attributes]
        self._calls: list[Call] = []
        self.probed = read_probes(partial(named_sample, self.decode), probes, dataset)
        with error_context(f"one of the samples {', '.join(map(str, probes))}"):
            for attribute in range(len(self._attributes)):
                self._split(attribute)

    def _split(self, attribute: int) -> None:
        """Move the transforms before the first random one to `deterministic`, and apply them to the probed samples."""
        places = [
            (calls, place) for _, calls in self.probed for place, (called, _) in enumerate(calls) if called == attribute
        ]
        inputs = [calls[place][1] for calls, place in places]
        if inputs and isinstance(inputs[0], dict):
            # A Compose that is called by name converts arguments and results, so it is not divided.
            owner, name = self._attributes[attribute]
            self.random[attribute] = [vars(owner)[name]]
        random, deterministic = self.random[attribute], self.deterministic[attribute]
        while inputs and random and not any(is_random(random[0], arguments) for arguments in inputs):
            deterministic.append(random.pop(0))
            inputs = [apply(deterministic[-1:], arguments) for arguments in inputs]
        for (calls, place), decoded in zip(places, inputs, strict=True):
            calls[place] = attribute, decoded

    def decode(self, index: int) -> DecodedSample:
        """The sample after the first step."""
        self._calls.clear()
        try:
            with self._recording():
                sample = self._dataset[index]
        except Exception as error:
            self._dataset[index]  # If this raises an error too, that one says more.
            raise DataError(
                f"its dataset uses its transform, or what that returns ({describe_error(error)}); {ADVICE}"
            ) from error
        return sample, list(self._calls)

    def transform(self, decoded: DecodedSample, random: Sequence[Sequence[Transform]] | None = None) -> Any:
        """The sample that the original dataset would have made; `random` are other random transforms."""
        sample, calls = decoded
        transforms = self.random if random is None else random
        return with_results(sample, [apply(transforms[attribute], inputs) for attribute, inputs in calls])

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Replace the dataset's transforms by `_record` for a while."""
        before = [vars(owner)[name] for owner, name in self._attributes]
        try:
            for attribute, (owner, name) in enumerate(self._attributes):
                vars(owner)[name] = partial(self._record, attribute)
            yield
        finally:
            for (owner, name), transform in zip(self._attributes, before, strict=True):
                vars(owner)[name] = transform

    def _record(self, attribute: int, *inputs: object, **named: object) -> object:
        if inputs and named:
            raise TypeError("its transform gets arguments with and without names")
        call = len(self._calls)
        decoded = apply(self.deterministic[attribute], named or inputs)
        for value in decoded.values() if isinstance(decoded, dict) else decoded:
            if isinstance(value, Image.Image):
                value.load()  # The dataset may close its file afterwards.
        self._calls.append((attribute, decoded))
        if named:
            return {name: TransformPlaceholder(call, name) for name in named}
        outputs = tuple(TransformPlaceholder(call, result) for result in range(len(inputs)))
        return outputs if len(outputs) > 1 else outputs[0]


def named_sample(read: Callable[[int], Any], index: int) -> Any:
    """What `read` makes of an index; an error is a `DataError` that names the sample."""
    with error_context(f"sample {index}"):
        return read(index)


def with_results(sample: object, results: Sequence[Any]) -> object:
    """A sample with the results of its calls in place of the placeholders."""

    def result(value: object) -> object:
        return results[value.call][value.result] if isinstance(value, TransformPlaceholder) else value

    return tree_map(result, sample, leaf_type=TransformPlaceholder)


def transform_attributes(dataset: object) -> Iterator[tuple[Any, str]]:
    """The objects that hold the transforms of a dataset, and the names of their attributes."""
    attributes = getattr(dataset, "__dict__", {})
    joint = attributes.get("transforms")
    candidates = [(dataset, "transform"), (dataset, "transforms")]
    if hasattr(joint, "target_transform"):  # torchvision keeps a transform of the image and one of the target in it.
        candidates[1] = joint, "transform"
    holders = [(owner, name) for owner, name in candidates if callable(getattr(owner, "__dict__", {}).get(name))]
    if holders:
        yield from holders
        return
    for value in attributes.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Dataset):
                yield from transform_attributes(part)


def single_transforms(transform: Transform) -> list[Transform]:
    """The transforms of a `Compose` or `nn.Sequential`, nested ones too, in order."""
    if isinstance(transform, nn.Sequential):
        parts = list(transform)
    elif type(transform).__name__ == "Compose" and isinstance(getattr(transform, "transforms", None), list | tuple):
        parts = list(transform.transforms)  # type: ignore[attr-defined]
    else:
        return [transform]
    return [step for part in parts for step in single_transforms(part)]


def apply(transforms: Sequence[Transform], inputs: Inputs) -> Inputs:
    """Apply transforms one after another."""
    for transform in transforms:
        if isinstance(inputs, dict):
            inputs = transform(**inputs)
            continue
        result = transform(*inputs)
        if len(inputs) > 1 and not (isinstance(result, tuple | list) and len(result) == len(inputs)):
            raise DataError(f"a transform gets {len(inputs)} arguments, and does not return as many results; {ADVICE}")
        inputs = tuple(result) if len(inputs) > 1 else (result,)
    return inputs


def is_random(transform: Transform, inputs: Inputs) -> bool:
    """Whether a transform uses a random generator, or gives two results for the same inputs.

    It tries a copy, because a transform may keep state.
    """
    trial = deepcopy(transform)
    with preserved_random_state(trial):
        return detect_randomness(lambda: apply([trial], copy_tree(inputs)), trial, always_repeat=True)[1] is not None


def transform_parts(dataset: object) -> list[Transform]:
    """All transforms of a dataset; a `Compose` is taken apart."""
    return [part for owner, name in transform_attributes(dataset) for part in single_transforms(vars(owner)[name])]


class TransformGuard:
    """Notices transforms that are replaced, or deterministic ones that change, after samples were decoded by them.

    Args:
        deterministic: transforms, and the collate function if batches are kept, that are not applied any more.
    """

    def __init__(self, dataset: object, deterministic: Sequence[object]) -> None:
        self._dataset, self._parts = dataset, transform_parts(dataset)
        self._digests = [(part, _digests(part)) for part in deterministic]
        self._ignored: set[tuple[int, str]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # The pickle of a tensor contains its address, which differs in a copy.
        return vars(self) | {"_digests": []}

    def ignore_changes(self) -> None:
        """Leave out the attributes that have changed by now, such as a counter or a cache that is filled lazily."""
        self._ignored = set(self._changed_attributes())

    def check(self) -> None:
        """Raise `ConfigError` if a transform has changed."""
        pairs = zip_longest(transform_parts(self._dataset), self._parts)
        changed: list[object] = [before if now is None else now for now, before in pairs if now is not before]
        changed += [self._digests[index][0] for index, _ in self._changed_attributes()]
        if changed:
            raise ConfigError(
                f"{getattr(changed[0], '__name__', type(changed[0]).__name__)} has changed since the samples were "
                "decoded, which do not have the change; set it before from_dataloader, or use the DataLoader as it is"
            )

    def _changed_attributes(self) -> Iterator[tuple[int, str]]:
        """The number of each deterministic part that has changed, and the name of the attribute."""
        for index, (part, before) in enumerate(self._digests):
            now = _digests(part)
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name) and (index, name) not in self._ignored:
                    yield index, name


def _digests(part: object) -> dict[str, bytes | None]:
    """A hash of the pickle of each attribute of an object, or of the object if it has none; None without a pickle.

    For a bound method, such as a collate function of the dataset, these are the attributes of its object.
    """
    owner = part.__self__ if isinstance(part, MethodType) else part
    attributes = getattr(owner, "__dict__", None) or {"": owner}
    return {name: _digest(value) for name, value in attributes.items()}


def _digest(value: object) -> bytes | None:
    try:
        return blake2b(pickle.dumps(value)).digest()
    except Exception:  # Any method of an object may fail.
        return None
