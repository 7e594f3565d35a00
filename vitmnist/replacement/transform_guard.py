"""Notices changes of transforms that were applied once, which the decoded samples do not have."""

import pickle
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import zip_longest
from types import MethodType
from typing import Any

from vitmnist.errors import ConfigError
from vitmnist.replacement.split_transforms import dataset_transforms


class TransformGuard:
    """Notices transforms that are replaced, and attributes of deterministic ones that are changed, after decoding.

    Attributes are compared by a hash of their pickle; changes of one that cannot be pickled are not noticed.

    Args:
        deterministic: transforms, and the collate function if batches are kept, that are not applied any more.
    """

    def __init__(self, dataset: object, deterministic: Iterable[object]) -> None:
        self._dataset, self._transforms = dataset, dataset_transforms(dataset)
        self._digests = [(transform, _attribute_digests(transform)) for transform in deterministic]
        self._ignored: set[tuple[int, str]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # The pickle of a tensor contains its address, which differs in a copy.
        return vars(self) | {"_digests": []}

    def ignore_changes(self) -> None:
        """Leave out the attributes that have changed by now, such as a counter or a cache that is filled lazily."""
        self._ignored = set(self._changed_attributes())

    def check(self) -> None:
        """Raise `ConfigError` if a transform has changed."""
        pairs = zip_longest(dataset_transforms(self._dataset), self._transforms)
        changed: list[object] = [before if now is None else now for now, before in pairs if now is not before]
        changed += [self._digests[index][0] for index, _ in self._changed_attributes()]
        if changed:
            raise ConfigError(
                f"{class_or_function_name(changed[0])} has changed since the samples were "
                "decoded, which do not have the change; set it before from_dataloader, or use the DataLoader as it is"
            )

    def _changed_attributes(self) -> Iterator[tuple[int, str]]:
        """The index of each deterministic transform that has changed, and the name of the attribute."""
        for index, (transform, before) in enumerate(self._digests):
            now = _attribute_digests(transform)
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name) and (index, name) not in self._ignored:
                    yield index, name


def class_or_function_name(transform: object) -> str:
    """What a message calls a transform."""
    return getattr(transform, "__name__", type(transform).__name__)


def _attribute_digests(transform: object) -> dict[str, bytes | None]:
    """The digest of each attribute of a transform, or under "" of a transform without attributes.

    Those of a bound method, such as a collate function that the dataset defines, are the attributes of its object.
    """
    owner = transform.__self__ if isinstance(transform, MethodType) else transform
    attributes = getattr(owner, "__dict__", None) or {"": owner}
    return {name: _digest(value) for name, value in attributes.items()}


def _digest(value: object) -> bytes | None:
    """A hash of the pickle of a value; None if it cannot be pickled."""
    try:
        return blake2b(pickle.dumps(value)).digest()
    except Exception:  # Any method of an object may fail.
        return None
