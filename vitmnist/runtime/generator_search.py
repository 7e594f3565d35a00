"""Finds the random generators and the counters that a dataset, a transform or any other object can use."""

import gc
import random
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import getattr_static
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

LEAF_TYPES = (int, float, str, bytes, NoneType, torch.Tensor, np.ndarray, ModuleType, type, BuiltinFunctionType, Logger)
"""Objects of these types are not searched for generators. A logger refers to all loggers."""
MAX_ELEMENTS = 1000
"""Containers with more elements are not searched: they hold data, such as a million file names."""
MAX_SEARCHED = 20_000
"""Maximum number of objects to search for generators."""
LIBRARIES = {*sys.stdlib_module_names, "numpy", "PIL", "torch", "torchvision"}
"""In classes of these packages, only the `SAMPLE_METHODS` are searched for generators; in functions, no variables."""
SAMPLE_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
"""The methods that read or transform a sample."""
StateAccess = tuple[Callable[[], object], Callable[[Any], object]]
"""Functions that get and set the state of a generator."""
GENERATOR_TYPES: dict[type, Callable[[Any], StateAccess]] = {
    torch.Generator: lambda generator: (generator.get_state, generator.set_state),
    random.Random: lambda generator: (generator.getstate, generator.setstate),
    np.random.RandomState: lambda generator: (generator.get_state, generator.set_state),
    np.random.Generator: lambda generator: (
        lambda: generator.bit_generator.state,
        lambda state: setattr(generator.bit_generator, "state", state),
    ),
}
"""The types of other generators, each with a function that returns the state access of an instance."""
PLAIN_TYPES = (bool, int, float, str)
"""The types of attributes that can hold state, such as a counter of samples."""


def find_generators(roots: Iterable[object]) -> Iterator[tuple[str, StateAccess]]:
    """Yield the name and the state access of each generator that an object can use."""
    for instance in find_reachable(roots):
        for kind, get_access in GENERATOR_TYPES.items():
            if isinstance(instance, kind) and not isinstance(instance, random.SystemRandom):  # It has no state.
                yield f"a {type(instance).__name__} of its own", get_access(instance)
        # State that affects samples is in an attribute of a dataset, a transform or a collate function.
        cls = type(instance)
        if not _is_library(cls.__module__) and any(hasattr(cls, method) for method in SAMPLE_METHODS):
            yield from find_plain_attributes(instance)


def find_plain_attributes(instance: object) -> Iterator[tuple[str, StateAccess]]:
    """Yield the name and the state access of each attribute that is a number, a flag or a string."""
    attributes = getattr(instance, "__dict__", {})

    def read(name: str) -> object:
        # Holding the dictionaries of classes instead would lead searches through all their methods.
        value = getattr_static(instance, name, None)
        return value if type(value) in PLAIN_TYPES else str(type(value))

    def write(name: str, value: object) -> None:
        if name in attributes and type(attributes[name]) in PLAIN_TYPES:
            attributes[name] = value

    for name in ChainMap(attributes, *map(vars, type(instance).__mro__)):  # type: ignore[arg-type]
        if not name.startswith("__") and type(getattr_static(instance, name)) in PLAIN_TYPES:
            yield f"{type(instance).__name__}.{name}", (partial(read, name), partial(write, name))


def find_reachable(roots: Iterable[Any]) -> Iterable[Any]:
    """Return all objects that take part in a sample: attributes, elements, methods, and variables of functions."""
    reached: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(reached) < MAX_SEARCHED:
        instance = waiting.popleft()
        if not isinstance(instance, LEAF_TYPES) and id(instance) not in reached:
            reached[id(instance)] = instance
            waiting.extend(_list_referents(instance))
    return reached.values()


def _list_referents(instance: object) -> list[Any]:
    """Return the objects that an object refers to, and the members of its class that can take part in a sample."""
    if isinstance(instance, dict | list | tuple | set | frozenset) and len(instance) > MAX_ELEMENTS:
        return []
    if isinstance(instance, FunctionType):
        return _list_function_referents(instance)
    referents = gc.get_referents(instance)  # Attributes, elements, the object of a method, the arguments of a partial
    for cls in type(instance).__mro__:
        is_library = _is_library(cls.__module__)
        for name, member in vars(cls).items():
            if name in SAMPLE_METHODS or not (is_library or name.startswith("__")):
                referents.append(member)
    return referents


def _list_function_referents(function: FunctionType) -> list[Any]:
    """Return the variables and defaults that a function uses, and the generators in modules that it uses."""
    names = [] if _is_library(function.__globals__.get("__name__")) else list(_iterate_names(function.__code__))
    referents = [function.__globals__.get(name) for name in names]
    modules = [value for value in referents if isinstance(value, ModuleType)]
    attributes = [vars(module).get(name) for module in modules for name in names]
    referents += [value for value in attributes if isinstance(value, tuple(GENERATOR_TYPES))]
    return [*referents, function.__closure__, function.__defaults__, function.__kwdefaults__]


def _is_library(module: object) -> bool:
    # In the type of a Cython function, `__module__` is a descriptor.
    return str(module).partition(".")[0] in LIBRARIES


def _iterate_names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function and in its lambdas and comprehensions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_names(constant)
