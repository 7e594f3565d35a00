"""What decoding once would freeze in a dataset: attributes that a training loop changes, and its own generators."""

from __future__ import annotations

import gc
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dis import get_instructions
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from vitmnist.errors import ConfigError

PLAIN = (int, float, str, bytes, type(None))
LEAVES = (*PLAIN, torch.Tensor, np.ndarray, ModuleType, type)
SMALL = 64  # elements; a larger container is compared by identity alone
MAX_COMPARED = 500  # values, with each batch
MAX_SEARCHED = 20_000  # objects; a generator is near the dataset, and a list of a million files is not searched
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
    """The attributes of a dataset and a collate function, and of the objects in them, such as transforms.

    Numbers and text are compared by value, anything else by identity: what is written into a tensor is not noticed. So
    are the global variables that the methods of these objects read, if they are numbers or text.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}
        self._ignored: set[str] = set()
        self._live: dict[int, Any] = {}  # no list: MONAI gives new seeds to what it finds in the lists of a dataset
        self._freeze()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_globals": {}}  # a spawned worker has the globals of its own import, as in the original

    def _freeze(self) -> None:
        self._before, live = self._values(), set(map(id, self._live.values()))
        self._globals = {
            f"the global {name} of {namespace.get('__name__')}": (namespace, name, namespace[name])
            for value in self._before.values()
            if id(value) not in live and not isinstance(value, LEAVES)
            for namespace, name in _globals_read(value)
            if name in namespace and isinstance(namespace[name], PLAIN)
        }

    def ignore_changes(self, live: Sequence[Any] = ()) -> None:
        """Leave out what making samples has changed by now, such as a counter, an open file, or drawn parameters.

        Args:
            live: objects to leave out too, such as transforms that are still applied to each sample.
        """
        changed = set(self._changed())
        self._ignored |= changed
        self._live |= enumerate(live, len(self._live))
        if changed or live:
            self._freeze()

    def check(self) -> None:
        """Raise `ConfigError` if an attribute has changed."""
        for name in self._changed():
            raise ConfigError(
                f"{name} has changed since the samples were decoded, which do not have the change; set it before "
                "from_dataloader, or use the DataLoader as it is"
            )

    def changed_values(self) -> set[str]:
        """The numbers and texts that are others now."""
        before = self._before | {title: value for title, (_, _, value) in self._globals.items()}
        now = self._values() | {title: space.get(name) for title, (space, name, _) in self._globals.items()}
        plain = [name for name, value in before.items() if isinstance(value, PLAIN) and type(now.get(name)) in PLAIN]
        return {name for name in plain if not _is_same(before[name], now[name])}

    def _changed(self) -> Iterator[str]:
        before, now = self._before, self._values()
        for name in before | now:
            is_same = name in before and name in now and _is_same(before[name], now[name])
            if not is_same and name not in self._ignored:
                yield name
        for title, (namespace, name, value) in self._globals.items():
            if not _is_same(namespace.get(name), value) and title not in self._ignored:
                yield title

    def _values(self) -> dict[str, Any]:
        """What is reached by attributes and elements, breadth first, by names such as `dataset.transforms[0].size`."""
        found: dict[str, Any] = {}
        seen, waiting = set(map(id, self._live.values())), deque(self._roots.items())
        while waiting and len(found) < MAX_COMPARED:
            name, value = waiting.popleft()
            if type(value) in STATES:  # it may be replaced by one of another seed, as by MONAI in each worker
                continue
            found[name] = value
            if isinstance(value, LEAVES) or id(value) in seen or name in self._ignored:
                continue
            seen.add(id(value))
            if not isinstance(value, list | tuple | dict):
                waiting += [(f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
            elif len(value) <= SMALL:
                parts = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [(f"{name}[{key!r}]", part) for key, part in parts]
        return found


def _globals_read(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The global variables that the methods in `CALLED` read, and the functions and methods of the same module."""
    value = value.func if isinstance(value, partial) else getattr(value, "__func__", value)
    methods = {name: one for kind in reversed(type(value).__mro__) for name, one in vars(kind).items()}
    waiting = [value, *(methods.get(name) for name in CALLED)]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        codes, namespace = [function.__code__], function.__globals__
        for code in codes:
            codes += [one for one in code.co_consts if isinstance(one, CodeType)]  # such as a comprehension
            for step in get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    yield namespace, step.argval
                    called = namespace.get(step.argval)
                    waiting += [called] if getattr(called, "__globals__", None) is namespace else []
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    waiting.append(methods.get(step.argval))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


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


def _reachable(root: Any) -> Iterable[Any]:
    reached, waiting = {id(root): root}, [root]
    while waiting and len(reached) < MAX_SEARCHED:
        referents = chain(*map(_referents, waiting), *map(_of_class, set(map(type, waiting))))
        others = {id(other): other for other in referents if not isinstance(other, LEAVES)}
        waiting = [other for key, other in others.items() if key not in reached]
        reached |= others
    return reached.values()


def _referents(one: Any) -> list[Any]:
    """What an object refers to; of a function, its closure, defaults, and the global names that it uses."""
    if isinstance(one, FunctionType):
        named = [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), *named]
    return gc.get_referents(one)


def _of_class(kind: type) -> list[Any]:
    """The methods of a class that make samples, and generators that all of its objects share, as those of MONAI."""
    values = [(name, value) for base in kind.__mro__ for name, value in vars(base).items()]
    return [
        value for name, value in values if type(value) in STATES or (name in CALLED and isinstance(value, FunctionType))
    ]
