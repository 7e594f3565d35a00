"""What decoding once would freeze in a dataset: attributes that a training loop changes, and its own generators."""

from __future__ import annotations

import gc
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from vitmnist.errors import ConfigError

PLAIN = (int, float, str, bytes, type(None))
ABSENT = object()
LEAVES = (*PLAIN, torch.Tensor, np.ndarray, ModuleType, type)
SMALL = 64  # elements of a container that are compared with each batch
MAX_OWNERS = 100
MAX_VISITED = 20_000  # objects; a generator is near the dataset, and a list of a million files is not searched
CALLED = ("__getitem__", "__getitems__", "__call__", "forward")  # methods whose global names are searched
STATES: dict[type, tuple[Any, Any]] = {  # how the state of a generator is read and written
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda one: one.bit_generator.state,
        lambda one, old: setattr(one.bit_generator, "state", old),
    ),
}


class FrozenState:
    """The attributes of objects, such as a dataset and a collate function, and of what they refer to by attributes.

    Objects are compared by identity, and so are the elements of small lists, tuples and dicts, such as the transforms
    of a `Compose`. What is written into a tensor or an array is not noticed.

    Args:
        live: objects whose own attributes may change, such as transforms that are still applied to each sample.
    """

    def __init__(self, *roots: Any, live: Iterable[Any] = ()) -> None:
        self._owners = [
            (owner, {name: (value, _elements(value)) for name, value in vars(owner).items()})
            for owner in _owners(roots, live)
        ]
        self._ignored: list[str] = []

    def ignore_changes(self) -> None:
        """Leave out attributes that have changed by now: reading samples changes them, such as a counter or a file."""
        self._ignored = list(self._changed())

    def check(self) -> None:
        """Raise `ConfigError` if an attribute is another one now."""
        for name in self._changed():
            if name not in self._ignored:
                raise ConfigError(
                    f"{name} has changed since the samples were decoded, and they do not follow it; set it before "
                    "from_dataloader, or use the DataLoader as it is"
                )

    def _changed(self) -> Iterator[str]:
        for owner, before in self._owners:
            now = vars(owner)
            for name in before.keys() | now.keys():
                old, elements = before.get(name, (ABSENT, ()))
                found = _elements(new := now.get(name, ABSENT))
                if not _is_same(old, new) or len(found) != len(elements) or not all(map(_is_same, found, elements)):
                    yield f"{type(owner).__name__}.{name}"


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


def _elements(value: Any) -> tuple[Any, ...]:
    """Those of a small list, tuple or dict."""
    if not isinstance(value, list | tuple | dict) or len(value) > SMALL:
        return ()
    return tuple(value.values() if isinstance(value, dict) else value)


def _owners(roots: Iterable[Any], live: Iterable[Any]) -> Iterator[Any]:
    """The objects with attributes that are reached by attributes, breadth first, without `live`."""
    reached = set(map(id, live))
    waiting = deque(roots)
    while waiting and len(reached) < MAX_OWNERS:
        owner = waiting.popleft()
        if id(owner) in reached or isinstance(owner, LEAVES) or not hasattr(owner, "__dict__"):
            continue
        reached.add(id(owner))
        yield owner
        for value in vars(owner).values():
            waiting += (value, *_elements(value))


@contextmanager
def preserved_own_generators(root: Any) -> Iterator[Callable[[], bool]]:
    """Restore random generators that an object refers to, such as those of a dataset's transforms, on exit.

    Yields a function that tells whether one of them has been used.
    """
    found = [(one, *STATES[type(one)]) for one in _reachable(root) if type(one) in STATES]
    states = [read(one) for one, read, _ in found]
    try:
        before = pickle.dumps(states)
        yield lambda: pickle.dumps([read(one) for one, read, _ in found]) != before
    finally:
        for (one, _, write), state in zip(found, states, strict=True):
            write(one, state)


def _reachable(root: Any) -> Iterator[Any]:
    reached = {id(root): root}
    waiting = [root]
    while waiting and len(reached) < MAX_VISITED:
        others = {id(other): other for one in waiting for other in _referents(one) if not isinstance(other, LEAVES)}
        waiting = [other for key, other in others.items() if key not in reached]
        reached |= others
    return iter(reached.values())


def _referents(one: Any) -> list[Any]:
    """What an object refers to; of a function, its closure, defaults, and the global names that it uses."""
    if isinstance(one, FunctionType):
        named = [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), *named]
    methods = [vars(kind)[name] for kind in type(one).__mro__ for name in CALLED if name in vars(kind)]
    return [*gc.get_referents(one), *(method for method in methods if isinstance(method, FunctionType))]
