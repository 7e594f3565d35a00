"""Splits the transforms of a dataset at the first random transform, and detects changes of transforms."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vitmnist.data.random_samples import call_and_check_random, read_probes
from vitmnist.errors import ConfigError, DataError, as_data_error, format_error
from vitmnist.replacement.original_dataloader import fetch_sample
from vitmnist.runtime.generator_search import find_plain_attributes, find_reachable
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.tree import copy_tree, map_leaves

Transform = Callable[..., Any]
Inputs = Any
"""The arguments of a transform: a tuple of an image and, for a joint transform, its target; or a dict by name."""
TRANSFORM_ATTRIBUTES = ("transform", "transforms")
"""The attributes of a dataset that are searched for transforms."""
SPLIT_ADVICE = "move the following steps into its attribute transform"
"""The end of messages about a dataset that cannot be split."""


class RecordedCall(NamedTuple):
    """A call of a transform attribute while a sample is decoded, with the inputs of its random transforms."""

    attribute: int
    inputs: Inputs


class ResultPlaceholder(NamedTuple):
    """Stands for a transform's result in a decoded sample. `call` is an index, `result` a position or name."""

    call: int
    result: int | str


@dataclass(frozen=True)
class OpaquePlaceholder:
    """Replaces a transform's result while a dataset reads a sample. It is no tuple, so a dataset cannot index it."""

    placeholder: ResultPlaceholder


class DecodedSample(NamedTuple):
    """A sample with placeholders for the results of its random transforms, and the calls that produce them."""

    sample: object
    calls: list[RecordedCall]


class SplitTransforms:
    """Splits `dataset[i]` into `decode` (deterministic, run once) and `transform` (random, run every epoch).

    Each attribute of `find_transform_attributes` is split at its first random transform. The transforms of targets
    belong to `decode`.

    Args:
        probes: indices of the samples on which the transforms are tried.

    Attributes:
        decoded_probes: the decoded samples with the indices `probes`.
        deterministic_transforms: the transforms that `decode` applies, for each attribute.
        random_transforms: the transforms that `transform` applies, for each attribute.

    Raises:
        DataError: a sample cannot be split.
        RandomSampleError: a sample is random before its transforms.
    """

    def __init__(self, dataset: Any, probes: Sequence[int]) -> None:
        self._dataset, self.probes = dataset, probes
        self._attributes = list(find_transform_attributes(dataset))
        self._recorders = [partial(self._record, attribute) for attribute in range(len(self._attributes))]
        self._calls: list[RecordedCall] = []
        self.deterministic_transforms: list[list[Transform]] = [[] for _ in self._attributes]
        self.random_transforms: list[list[Transform]] = []
        recorded, random_sample = read_probes(partial(fetch_sample, self.decode), probes, dataset)
        if random_sample:
            raise random_sample
        with as_data_error(f"one of the samples {', '.join(map(str, probes))}"):
            for attribute, (owner, name) in enumerate(self._attributes):
                inputs = [call.inputs for _, calls in recorded for call in calls if call.attribute == attribute]
                self.deterministic_transforms[attribute], random = split_at_first_random(vars(owner)[name], inputs)
                self.random_transforms.append(random)
            self.decoded_probes = [
                DecodedSample(sample, [self._decode_call(call) for call in calls]) for sample, calls in recorded
            ]

    def _decode_call(self, call: RecordedCall) -> RecordedCall:
        """Apply the deterministic transforms to the inputs of a call."""
        return call._replace(inputs=apply_transforms(self.deterministic_transforms[call.attribute], call.inputs))

    def decode(self, index: int) -> DecodedSample:
        """Read a sample, and apply only the deterministic transforms."""
        self._calls.clear()
        try:
            with replace_transforms(self._attributes, self._recorders):
                sample = self._dataset[index]
        except Exception as error:
            self._dataset[index]  # If the dataset itself fails, raise its own, more helpful error.
            raise DataError(
                f"its dataset uses its transform, or the result of it ({format_error(error)}); {SPLIT_ADVICE}"
            ) from error
        sample = map_leaves(lambda leaf: leaf.placeholder if isinstance(leaf, OpaquePlaceholder) else leaf, sample)
        return DecodedSample(sample, list(self._calls))

    def transform(self, decoded: DecodedSample, random: Sequence[Sequence[Transform]] | None = None) -> Any:
        """Apply the random transforms to a decoded sample.

        Args:
            random: transforms to apply instead.
        """
        transforms = self.random_transforms if random is None else random
        results = [apply_transforms(transforms[call.attribute], call.inputs) for call in decoded.calls]

        def get_result(leaf: object) -> object:
            return results[leaf.call][leaf.result] if isinstance(leaf, ResultPlaceholder) else leaf

        return map_leaves(get_result, decoded.sample, leaf_type=ResultPlaceholder)

    def _record(self, attribute: int, *inputs: object, **keyword_inputs: object) -> object:
        """Apply the deterministic transforms, record the call, and return placeholders for its results."""
        if inputs and keyword_inputs:
            raise TypeError("its transform gets arguments with and without names")
        position, call = len(self._calls), self._decode_call(RecordedCall(attribute, keyword_inputs or inputs))
        for value in call.inputs.values() if keyword_inputs else call.inputs:
            if isinstance(value, Image.Image):
                value.load()  # The dataset can close the file afterwards.
        self._calls.append(call)
        if keyword_inputs:
            return {name: OpaquePlaceholder(ResultPlaceholder(position, name)) for name in keyword_inputs}
        outputs = tuple(OpaquePlaceholder(ResultPlaceholder(position, result)) for result in range(len(inputs)))
        return outputs if len(outputs) > 1 else outputs[0]


def find_transform_attributes(dataset: object) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each attribute of a dataset that has transforms.

    Their names are `TRANSFORM_ATTRIBUTES`. For a dataset without them, such as a `Subset` or `ConcatDataset`, the
    datasets in its attributes are searched.
    """
    attributes = getattr(dataset, "__dict__", {})
    joint = attributes.get("transforms")
    candidates = [(dataset, name) for name in TRANSFORM_ATTRIBUTES]
    if hasattr(joint, "target_transform"):  # torchvision's pair of transforms of the image and of the target
        candidates[1] = joint, "transform"
    holders = [(owner, name) for owner, name in candidates if callable(getattr(owner, "__dict__", {}).get(name))]
    if holders:
        yield from holders
        return
    for value in attributes.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Dataset):
                yield from find_transform_attributes(part)


@contextmanager
def replace_transforms(attributes: Sequence[tuple[Any, str]], transforms: Iterable[Transform]) -> Iterator[None]:
    """Set the attributes of `find_transform_attributes` to other transforms, and restore them on exit."""
    originals = [vars(owner)[name] for owner, name in attributes]
    try:
        for (owner, name), transform in zip(attributes, transforms, strict=True):
            vars(owner)[name] = transform
        yield
    finally:
        for (owner, name), transform in zip(attributes, originals, strict=True):
            vars(owner)[name] = transform


def list_transforms(dataset: object) -> list[Transform]:
    """Return all transforms of a dataset, without the `Compose` around them."""
    holders = find_transform_attributes(dataset)
    return [transform for owner, name in holders for transform in flatten_transforms(vars(owner)[name])]


def flatten_transforms(transform: Transform) -> list[Transform]:
    """Return the transforms of a `Compose` or `nn.Sequential` in order, without nesting."""
    if isinstance(transform, nn.Sequential):
        parts = list(transform)
    elif type(transform).__name__ == "Compose" and isinstance(getattr(transform, "transforms", None), list | tuple):
        parts = list(transform.transforms)  # type: ignore[attr-defined]
    else:
        return [transform]
    return [single for part in parts for single in flatten_transforms(part)]


def apply_transforms(transforms: Sequence[Transform], inputs: Inputs) -> Inputs:
    """Apply transforms in order. Returns the results in the form of `inputs`."""
    for transform in transforms:
        if isinstance(inputs, dict):
            inputs = transform(**inputs)
            continue
        result = transform(*inputs)
        if len(inputs) > 1 and not (isinstance(result, tuple | list) and len(result) == len(inputs)):
            raise DataError(f"a transform takes {len(inputs)} arguments and returns another number; {SPLIT_ADVICE}")
        inputs = tuple(result) if len(inputs) > 1 else (result,)
    return inputs


def split_at_first_random(transform: Transform, inputs: Sequence[Inputs]) -> tuple[list[Transform], list[Transform]]:
    """Split a `Compose` into the transforms before its first random transform, and the remaining transforms.

    Args:
        inputs: the arguments of each call on which the transforms are tried.
    """
    # A Compose with keyword arguments converts them and its results, so it cannot be divided.
    is_divisible = not any(isinstance(arguments, dict) for arguments in inputs)
    deterministic: list[Transform] = []
    random = flatten_transforms(transform) if is_divisible else [transform]
    while inputs and random and not any(is_random(random[0], arguments) for arguments in inputs):
        deterministic.append(random.pop(0))
        inputs = [apply_transforms(deterministic[-1:], copy_tree(arguments)) for arguments in inputs]
    return deterministic, random


def is_random(transform: Transform, inputs: Inputs) -> bool:
    """Whether a transform uses a random generator, or returns different results for the same inputs."""
    trial = deepcopy(transform)  # A call can change the state of a transform.
    with preserve_random_state(trial):
        _, reason = call_and_check_random(
            lambda: apply_transforms([trial], copy_tree(inputs)), trial, always_repeat=True
        )
    return reason is not None


class TransformGuard:
    """Detects that a transform was replaced, or that a deterministic transform or the dataset has changed.

    It compares the `repr` of deterministic transforms, and the attributes that are numbers, flags or strings.

    Args:
        deterministic: the transforms that are applied only once.
    """

    def __init__(self, dataset: object, deterministic: Iterable[object]) -> None:
        self._dataset, self._transforms = dataset, list_transforms(dataset)
        once = [*deterministic]
        parts = [*once, *(part for part in find_reachable([dataset]) if isinstance(part, Dataset))]
        self._watched: list[tuple[object, str, Callable[[], object], object]] = []
        for part in once:
            self._watched.append((part, get_transform_name(part), partial(repr, part), repr(part)))
        for part in parts:
            self._watched += [(part, name, read, read()) for name, (read, _) in find_plain_attributes(part)]

    def __getstate__(self) -> dict[str, Any]:
        # The `repr` of a copy can differ, because by default it contains the address.
        return vars(self) | {"_watched": []}

    def start(self, collate: object) -> None:
        """Ignore what building the replacement changed, and what `collate` or transforms of later epochs use."""
        once = [part for part, *_ in self._watched]
        live = [transform for transform in self._transforms if not any(transform is part for part in once)]
        used = {id(part) for part in find_reachable([collate, *live])}
        self._watched = [item for item in self._watched if id(item[0]) not in used and item[2]() == item[3]]

    def check(self) -> None:
        """Raise `ConfigError` if a transform or the dataset has changed."""
        pairs = zip_longest(list_transforms(self._dataset), self._transforms)
        changed = [get_transform_name(now or before) for now, before in pairs if now is not before]
        changed += [name for _, name, read, value in self._watched if read() != value]
        if changed:
            raise ConfigError(
                f"{changed[0]} has changed since the samples were decoded; set it before from_dataloader, or use the "
                "DataLoader as it is"
            )


def get_transform_name(transform: object) -> str:
    """Return the name of a transform for messages."""
    return getattr(transform, "__name__", type(transform).__name__)
