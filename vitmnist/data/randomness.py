"""Seeds, captures and restores random generators, and detects samples that use them.

A sample is random if each read advances a generator, or if a second read returns something else. The generators are
the global ones of torch (CPU), NumPy and Python, and those that are reachable from a dataset, a transform or a collate
function: through attributes, containers, class attributes, and the variables of methods and nested functions. Other
sources, such as a `default_rng()` created for each sample, `secrets` or a server, go undetected unless the sample is
read twice.
"""

import gc
import pickle
import random
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from vitmnist.errors import ConfigError
from vitmnist.store.tree import find_difference

PROBES = 16
"""Number of samples to read to find out whether a dataset is random."""
LEAF_TYPES = (
    *(int, float, str, bytes, type(None), torch.Tensor, np.ndarray),
    *(ModuleType, type, BuiltinFunctionType, Logger),  # A logger refers to all loggers.
)
"""Objects of these types are not searched for generators."""
MAX_ELEMENTS = 1000
"""Containers with more elements are not searched: they hold data, such as a million file names."""
MAX_SEARCHED = 20_000
"""Maximum number of objects to search for generators."""
LIBRARIES = {*sys.stdlib_module_names, "numpy", "PIL", "torch", "torchvision"}
"""In classes of these packages, only the `SAMPLE_METHODS` are searched for generators; in functions, no variables."""
SAMPLE_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
"""The methods that read or transform a sample."""
Result = TypeVar("Result")
StateAccess = tuple[Callable[[], object], Callable[[Any], object]]
"""Functions that get and set the state of a generator."""
GLOBAL_GENERATORS: dict[str, StateAccess] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "NumPy": (np.random.get_state, np.random.set_state),
    "Python": (random.getstate, random.setstate),
}
"""The global generators that samples draw from, by name."""
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


class RandomState:
    """A snapshot of the states of the global random generators, and of generators that other objects refer to.

    Args:
        roots: objects that can refer to generators, such as datasets and transforms.
        device: if it is a CUDA device, its global generator is included.
    """

    def __init__(self, *roots: object, device: torch.device | None = None) -> None:
        self._global = dict(GLOBAL_GENERATORS)
        if device and device.type == "cuda":
            access = partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device)
            self._global["CUDA"] = access
        self._generators = list(self._global.items())
        for instance in _find_reachable(roots):
            for kind, access_to in GENERATOR_TYPES.items():
                if isinstance(instance, kind) and not isinstance(instance, random.SystemRandom):  # It has no state.
                    self._generators.append((f"a {type(instance).__name__} of its own", access_to(instance)))
        self._states = self._read()

    def _read(self) -> list[object]:
        return [read() for _, (read, _) in self._generators]

    def restore(self) -> None:
        """Set all generators to the states of the snapshot."""
        for (_, (_, write)), state in zip(self._generators, self._states, strict=True):
            write(state)

    def changed(self) -> list[str]:
        """The names of the generators whose state has changed since the snapshot."""
        pairs = zip(self._generators, map(_state_bytes, self._states), map(_state_bytes, self._read()), strict=True)
        return [name for (name, _), before, now in pairs if before != now]

    def to_dict(self) -> dict[str, object]:
        """The states of the global generators as plain values, for a checkpoint."""
        states: dict[str, Any] = {name.lower(): state for name, state in zip(self._global, self._states, strict=False)}
        name, keys, *rest = states["numpy"]
        return {**states, "numpy": [name, keys.tolist(), *rest]}

    def load_dict(self, states: Mapping[str, object]) -> None:
        """Restore global generators from the result of `to_dict`. A generator that it lacks keeps its state."""
        for name, (_, write) in self._global.items():
            if (state := states.get(name.lower())) is not None:
                write(state)


def _state_bytes(state: object) -> bytes:
    # The pickle of a tensor contains its address.
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


@contextmanager
def preserved_random_state(*roots: object, device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of random generators on exit. Takes the arguments of `RandomState`."""
    state = RandomState(*roots, device=device)
    try:
        yield
    finally:
        state.restore()


class RandomSampleError(ConfigError):
    """A sample is random, so storing it would repeat one version of it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index

    def __str__(self) -> str:
        return "sample {} is random ({})".format(*self.args)


def call_and_check_random(
    function: Callable[[], Result], roots: object, *, always_repeat: bool
) -> tuple[Result, str | None]:
    """Return the result of a function, and the reason why it is random, or None if it is not.

    If the function uses a generator, it is called again without resetting the generator. If both calls end in the same
    state with equal results, the function seeds itself.

    Args:
        roots: objects that can refer to generators.
        always_repeat: call the function twice even if it uses no generator, and compare the results.
    """
    before = RandomState(roots)
    result = function()
    used = before.changed()
    if not (used or always_repeat):
        return result, None
    before = RandomState(roots)
    difference = find_difference(function(), result)
    if used and before.changed():
        return result, f"it draws from {', '.join(used)}"
    return result, "it differs when it is read again" if difference else None


def choose_probes(size: int) -> list[int]:
    """Return the indices of the samples, evenly spread, to read to find out whether a dataset is random."""
    return sorted({probe * size // PROBES for probe in range(PROBES)}) if size else []


def read_probes(read: Callable[[int], Result], indices: Iterable[int], roots: object) -> list[Result]:
    """Read samples. Raises `RandomSampleError` for a random one. The first sample is read twice and compared."""
    samples: list[Result] = []
    for index in indices:
        sample, reason = call_and_check_random(partial(read, index), roots, always_repeat=not samples)
        if reason:
            raise RandomSampleError(index, reason)
        samples.append(sample)
    return samples


@contextmanager
def refuse_random_samples(read: Callable[[int], object], indices: Sequence[int], roots: object) -> Iterator[None]:
    """Raise `RandomSampleError` if the block reads a random sample.

    Generators are compared once for all samples. Only if one was used are the samples read again, one by one.
    """
    before = RandomState(roots)
    yield
    if before.changed():
        for index in indices:
            _, reason = call_and_check_random(partial(read, index), roots, always_repeat=False)
            if reason:
                raise RandomSampleError(index, reason)


def has_set_epoch(dataset: object) -> bool:
    """Whether a dataset changes its samples in `set_epoch`: its own, or that of a nested dataset or a transform."""
    reachable = _find_reachable([dataset])
    return any(hasattr(type(part), "set_epoch") and not isinstance(part, Sampler) for part in reachable)


def _find_reachable(roots: Iterable[Any]) -> Iterable[Any]:
    reached: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(reached) < MAX_SEARCHED:
        instance = waiting.popleft()
        if not isinstance(instance, LEAF_TYPES) and id(instance) not in reached:
            reached[id(instance)] = instance
            waiting.extend(_parts_of(instance))
    return reached.values()


def _parts_of(instance: object) -> list[Any]:
    """Return the objects that an object refers to, and the members of its class that can take part in a sample."""
    if isinstance(instance, dict | list | tuple | set | frozenset) and len(instance) > MAX_ELEMENTS:
        return []
    if isinstance(instance, FunctionType):
        return _parts_of_function(instance)
    parts = gc.get_referents(instance)  # Attributes, elements, the object of a method, the arguments of a partial
    for kind in type(instance).__mro__:
        is_library = _is_library(kind.__module__)
        for name, part in vars(kind).items():
            if name in SAMPLE_METHODS or not (is_library or name.startswith("__")):
                parts.append(part)
    return parts


def _parts_of_function(function: FunctionType) -> list[Any]:
    """Return the variables and defaults that a function uses, and the generators in modules that it uses."""
    names = [] if _is_library(function.__globals__.get("__name__")) else list(_names_in(function.__code__))
    parts = [function.__globals__.get(name) for name in names]
    modules = [part for part in parts if isinstance(part, ModuleType)]
    attributes = [vars(module).get(name) for module in modules for name in names]
    parts += [part for part in attributes if isinstance(part, tuple(GENERATOR_TYPES))]
    return [*parts, function.__closure__, function.__defaults__, function.__kwdefaults__]


def _is_library(module: object) -> bool:
    # In the type of a Cython function, `__module__` is a descriptor.
    return str(module).partition(".")[0] in LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function and in its lambdas and comprehensions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def read_samples(dataset: Dataset[Any], indices: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """Read samples of a map-style dataset. Seeds `GLOBAL_GENERATORS` before each, and restores their states.

    The random numbers of torchvision's transforms therefore depend on (seed, epoch, index) alone, not on the worker or
    on the samples that it has read before. A dataset with another generator is not covered. An index can be one of
    the sampler's `draws`.
    """

    def read() -> Iterator[Any]:
        for index in indices:
            seed_generators(seed, epoch, index)
            yield dataset[index % len(dataset)]  # type: ignore[arg-type]  # torch has no protocol for it

    with preserved_random_state():
        # In a generator, Python replaces a `StopIteration` of the dataset, which would end the epoch without an error.
        return list(read())


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed `GLOBAL_GENERATORS` from a hash of the three numbers. This takes 10 µs."""
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=20).digest()
    torch_seed, numpy_seed, python_seed = struct.unpack("<QIQ", digest)
    # torch.manual_seed would also seed the generators of every accelerator, in 230 µs.
    torch.default_generator.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)
