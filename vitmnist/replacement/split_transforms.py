"""Splits the transforms of a dataset at the first random one: those before it need to be applied only once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NamedTuple

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vitmnist.data.randomness import call_watched, preserved_random_state, read_probes
from vitmnist.errors import ConfigError, DataError, described, naming
from vitmnist.store.tree import copied, tree_map

Transform = Callable[..., Any]
Inputs = Any
"""The arguments of a transform, a tuple: an image, or for a joint transform an image and its target; or a dict by name.
"""
ADVICE = "name the two steps with decode= and transform="


class TransformPlaceholder(NamedTuple):
    """Stands in a sample for a result of its transforms: the number of the call, number or name of the result."""

    call: int
    result: int | str


class TwoStepDataset(Dataset[Any]):
    """A dataset whose samples are made in two steps: its own `[index]` decodes one, and `transform` completes it.

    The deterministic transforms before the first random one belong to the first step, the others to the second. The
    transforms are the attributes `transform` and `transforms` of the dataset, or if it has none, of the datasets in
    its attributes, such as those of a `Subset` or `ConcatDataset`. A target's transform belongs to the first step.

    Args:
        probes: indices of samples on which the transforms are tried; `probed` has these, decoded.

    Raises:
        DataError: a sample cannot be split.
        RandomSampleError: a sample is random before its transforms.
    """

    def __init__(self, dataset: Any, probes: Sequence[int]) -> None:
        self._dataset, self._size = dataset, len(dataset)
        self._attributes = list(transform_attributes(dataset))
        self.random = [single_transforms(vars(owner)[name]) for owner, name in self._attributes]
        self.deterministic: list[list[Transform]] = [[] for _ in self._attributes]
        self._calls: list[tuple[int, Inputs]] = []
        self.probed = read_probes(self.__getitem__, probes, dataset)
        for position, (owner, name) in enumerate(self._attributes):
            # Which call of which sample this transform gets, and with what.
            calls = [
                (calls, at) for positions, _, calls in self.probed for at, of in enumerate(positions) if of == position
            ]
            if not calls:
                continue
            if isinstance(calls[0][0][calls[0][1]], dict):  # such a Compose converts arguments and results
                self.random[position] = [vars(owner)[name]]
            random, deterministic = self.random[position], self.deterministic[position]
            with naming(f"one of the samples {', '.join(map(str, probes))}"):
                while random and not any(is_random(random[0], inputs[at]) for inputs, at in calls):
                    deterministic.append(random.pop(0))
                    for inputs, at in calls:
                        inputs[at] = apply(deterministic[-1:], inputs[at])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[list[int], object, list[Inputs]]:
        """A decoded sample: (which transform each call was of, the sample with placeholders, inputs of each call)."""
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
        return [position for position, _ in self._calls], sample, [inputs for _, inputs in self._calls]

    def transform(self, decoded: Any, random: Sequence[Sequence[Transform]] | None = None) -> Any:
        """The sample that the original dataset would have made; `random` are other random transforms."""
        return with_results(decoded[1], self.results(self.random if random is None else random, decoded))

    def results(self, random: Sequence[Sequence[Transform]], decoded: Any) -> list[Inputs]:
        """What some random transforms make of the inputs of each call."""
        positions, _, calls = decoded
        return [apply(random[position], inputs) for position, inputs in zip(positions, calls, strict=True)]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Replace the dataset's transforms by `_record` for a while."""
        before = [vars(owner)[name] for owner, name in self._attributes]
        try:
            for position, (owner, name) in enumerate(self._attributes):
                vars(owner)[name] = partial(self._record, position)
            yield
        finally:
            for (owner, name), transform in zip(self._attributes, before, strict=True):
                vars(owner)[name] = transform

    def _record(self, position: int, *inputs: object, **named: object) -> object:
        if inputs and named:
            raise TypeError("its transform gets arguments with and without names")
        call = len(self._calls)
        decoded = apply(self.deterministic[position], named or inputs)
        for value in decoded.values() if isinstance(decoded, dict) else decoded:
            if isinstance(value, Image.Image):
                value.load()  # while its file is open
        self._calls.append((position, decoded))
        if named:
            return {name: TransformPlaceholder(call, name) for name in named}
        outputs = tuple(TransformPlaceholder(call, result) for result in range(len(inputs)))
        return outputs if len(outputs) > 1 else outputs[0]


class NamedSteps(Dataset[Any]):
    """Like `TwoStepDataset`, for a dataset whose two steps the user has named.

    Args:
        probed: the samples of `probes`, decoded; read here if None.
    """

    deterministic: Sequence[list[Transform]] = ()

    def __init__(
        self,
        decode: Transform,
        transform: Transform,
        dataset: Any,
        probes: Sequence[int],
        probed: list[Any] | None = None,
    ) -> None:
        self.decode, self.transform, self._dataset = decode, transform, dataset
        self.probed = read_probes(self.__getitem__, probes, (decode, dataset)) if probed is None else probed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> object:
        with naming(f"sample {index}"):
            return self.decode(index)


def with_results(sample: object, results: Sequence[Any]) -> object:
    """A sample with the results of its calls in place of the placeholders."""

    def result(value: object) -> object:
        return results[value.call][value.result] if isinstance(value, TransformPlaceholder) else value

    return tree_map(result, sample, leaf_type=TransformPlaceholder)


def transform_attributes(dataset: object) -> Iterator[tuple[Any, str]]:
    """The objects that hold the transforms of a dataset, and the names of their attributes."""
    attributes = getattr(dataset, "__dict__", {})
    joint = attributes.get("transforms")
    has_pair = hasattr(joint, "target_transform")  # torchvision's transforms of an image and of its target
    candidates = [(dataset, "transform"), (joint, "transform") if has_pair else (dataset, "transforms")]
    holders = [(owner, name) for owner, name in candidates if callable(getattr(owner, "__dict__", {}).get(name))]
    yield from holders
    for value in attributes.values() if not holders else ():
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
    """Whether a transform uses a random generator, or gives two results for the same inputs.

    It tries a copy, because a transform may keep state.
    """
    trial = deepcopy(transform)
    with preserved_random_state(trial):
        return call_watched(lambda: apply([trial], copied(inputs)), trial, again=True)[1] is not None


def transform_parts(dataset: object) -> list[Transform]:
    """All transforms of a dataset, those of a `Compose` one by one."""
    return [part for owner, name in transform_attributes(dataset) for part in single_transforms(vars(owner)[name])]


class TransformGuard:
    """Notices transforms that are replaced, or deterministic ones that change, after samples were decoded by them.

    Args:
        deterministic: transforms, and the collate function if batches are kept, that are not applied any more.
    """

    def __init__(self, dataset: object, deterministic: Sequence[object]) -> None:
        self._dataset, self._parts = dataset, transform_parts(dataset)
        self._digests = [(part, _digest(part)) for part in deterministic]

    def __getstate__(self) -> dict[str, Any]:
        # The pickle of a tensor contains its address, which is another one in a copy.
        return vars(self) | {"_digests": []}

    def ignore_changes(self) -> None:
        """Leave out those that have changed by now, because they keep a counter, or a cache that is filled lazily."""
        self._digests = [(part, digest) for part, digest in self._digests if digest == _digest(part)]

    def check(self) -> None:
        """Raise `ConfigError` if a transform has changed."""
        pairs = zip_longest(transform_parts(self._dataset), self._parts)
        changed: list[object] = [before if now is None else now for now, before in pairs if now is not before]
        changed += [part for part, digest in self._digests if digest != _digest(part)]
        if changed:
            raise ConfigError(
                f"{getattr(changed[0], '__name__', type(changed[0]).__name__)} has changed since the samples were "
                "decoded, which do not have the change; set it before from_dataloader, or use the DataLoader as it is"
            )


def _digest(part: object) -> bytes | None:
    """A hash of an object's pickle; None if it cannot be pickled."""
    try:
        return blake2b(pickle.dumps(part)).digest()
    except Exception:  # any method of an object may fail
        return None
