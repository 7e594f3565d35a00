"""Finds the transforms of a dataset, and splits them at the first random transform."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vitmnist.data.random_samples import call_and_check_random, read_probes
from vitmnist.errors import DataError, as_data_error, format_error
from vitmnist.replacement.original_dataloader import fetch_sample
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.tree import copy_tree, flatten_tree, replace_leaves

Transform = Callable[..., Any]
Inputs = Any
"""The arguments of a transform: a tuple of an image and, for a joint transform, its target; or a dict by name."""
SPLIT_ADVICE = "move the following steps into its attribute transform"
"""The end of messages about a dataset that cannot be split."""
RecordedCall = tuple[int, Inputs]
"""The transform attribute that was called while a sample was decoded, and the inputs of its random transforms."""
DecodedSample = tuple[Any, list[RecordedCall], list[tuple[int, int, int | str]]]
"""A sample that lacks the results of its random transforms, the calls that produce them, and where they belong: the
position of a leaf in the sample, and its call and result as in `PendingResult`. It consists of plain tuples and lists,
because `json_codec` stores no other types."""


@dataclass(frozen=True)
class PendingResult:
    """Stands for the result of random transforms. It is not a tuple, so a dataset cannot unpack it."""

    call: int  # The index of the call
    result: int | str  # The position or name of the result


@dataclass(frozen=True, eq=False)
class CallRecorder:
    """Replaces a transform attribute while a dataset reads a sample, so that only its deterministic transforms run."""

    attribute: int
    deterministic: Sequence[Transform]
    calls: list[RecordedCall]  # Each call is appended.

    def __call__(self, *inputs: object, **keyword_inputs: object) -> object:
        """Record a call, and return placeholders for the results of the random transforms."""
        if inputs and keyword_inputs:
            raise TypeError("its transform gets arguments with and without names")
        decoded = apply_transforms(self.deterministic, keyword_inputs or inputs)
        for value in decoded.values() if keyword_inputs else decoded:
            if isinstance(value, Image.Image):
                value.load()  # The dataset can close the file afterwards.
        call = len(self.calls)
        self.calls.append((self.attribute, decoded))
        if keyword_inputs:
            return {name: PendingResult(call, name) for name in keyword_inputs}
        outputs = tuple(PendingResult(call, result) for result in range(len(inputs)))
        return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True)
class SplitTransforms:
    """Splits `dataset[i]` into `decode` (deterministic, run once) and `transform` (random, run every epoch).

    `dataset[i]` equals `transform(decode(i))`. The transforms of targets belong to `decode`.
    """

    dataset: Any
    attributes: Sequence[tuple[Any, str]]  # All of `find_transform_attributes`
    deterministic: Sequence[Sequence[Transform]]  # The transforms before the first random one, for each attribute
    random_parts: Sequence[Sequence[Transform]]  # The first random transform and all that follow it, for each attribute

    def decode(self, index: int) -> DecodedSample:
        """Read a sample, and apply only the deterministic transforms."""
        calls: list[RecordedCall] = []
        recorders = [CallRecorder(index, transforms, calls) for index, transforms in enumerate(self.deterministic)]
        try:
            with replace_transforms(self.attributes, recorders):
                sample = self.dataset[index]
        except Exception as error:
            self.dataset[index]  # If the dataset itself fails, raise its own, more helpful error.
            raise DataError(
                f"its dataset uses its transform, or the result of it ({format_error(error)}); {SPLIT_ADVICE}"
            ) from error
        leaves = enumerate(flatten_tree(sample)[0])
        pending = [(position, leaf.call, leaf.result) for position, leaf in leaves if isinstance(leaf, PendingResult)]
        return replace_leaves(sample, [(position, None) for position, *_ in pending]), calls, pending

    def transform(self, decoded: DecodedSample) -> Any:
        """Apply the random transforms to a decoded sample."""
        sample, calls, pending = decoded
        results = [apply_transforms(self.random_parts[attribute], inputs) for attribute, inputs in calls]
        return replace_leaves(sample, [(position, results[call][result]) for position, call, result in pending])


def split_transforms(dataset: Any, probes: Sequence[int]) -> SplitTransforms:
    """Split each transform attribute of a dataset at its first random transform, tried on the samples `probes`.

    Raises `RandomSampleError` if a sample is random before its transforms.
    """
    attributes = list(find_transform_attributes(dataset))
    untransformed = SplitTransforms(dataset, attributes, [()] * len(attributes), ())
    recorded, random_sample = read_probes(partial(fetch_sample, untransformed.decode), probes, dataset)
    if random_sample:
        raise random_sample
    calls = [call for _, sample_calls, _ in recorded for call in sample_calls]
    deterministic, random_parts = [], []
    with as_data_error(f"one of the samples {', '.join(map(str, probes))}"):
        for attribute, (owner, name) in enumerate(attributes):
            inputs = [inputs for called, inputs in calls if called == attribute]
            first, rest = split_at_first_random(vars(owner)[name], inputs)
            deterministic.append(first)
            random_parts.append(rest)
    return SplitTransforms(dataset, attributes, deterministic, random_parts)


def find_transform_attributes(dataset: object) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each attribute `transform` or `transforms` of a dataset.

    For a dataset without them, such as a `Subset` or `ConcatDataset`, the datasets in its attributes are searched.
    """
    attributes = getattr(dataset, "__dict__", {})
    joint = attributes.get("transforms")
    candidates = [(dataset, "transform"), (dataset, "transforms")]
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
    with ExitStack() as stack:
        for (owner, name), transform in zip(attributes, transforms, strict=True):
            stack.callback(vars(owner).__setitem__, name, vars(owner)[name])
            vars(owner)[name] = transform
        yield


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
    """Split a `Compose` before its first random transform. The transforms are tried on the arguments of some calls."""
    # A Compose with keyword arguments converts them and its results, so it cannot be divided.
    is_divisible = not any(isinstance(arguments, dict) for arguments in inputs)
    deterministic: list[Transform] = []
    random_part = flatten_transforms(transform) if is_divisible else [transform]
    while inputs and random_part and not any(is_random(random_part[0], arguments) for arguments in inputs):
        deterministic.append(random_part.pop(0))
        inputs = [apply_transforms(deterministic[-1:], copy_tree(arguments)) for arguments in inputs]
    return deterministic, random_part


def is_random(transform: Transform, inputs: Inputs) -> bool:
    """Whether a transform uses a random generator, or returns different results for the same inputs."""
    trial = deepcopy(transform)  # A call can change the state of a transform.
    with preserve_random_state(trial):
        _, reason = call_and_check_random(
            lambda: apply_transforms([trial], copy_tree(inputs)), trial, always_repeat=True
        )
    return reason is not None


def get_transform_name(transform: object) -> str:
    """Return the name of a transform for messages."""
    return getattr(transform, "__name__", type(transform).__name__)
