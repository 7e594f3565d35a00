"""What is random: reading it uses a random generator, and reading it again ends differently.

The generators are the global ones of torch (CPU), NumPy and Python, and those in attributes, containers, closures and
class attributes of datasets, transforms and collate functions, and in global variables that their `__getitem__`,
`__call__` and `forward` read. Others cannot be seen, such as a `default_rng()` that is made for each sample, `secrets`
or a server: a sample that uses them is noticed only if it is among the few that are read twice and compared.
"""

from __future__ import annotations

import inspect
import pickle
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from vitmnist.errors import ConfigError
from vitmnist.store.tree import find_difference

PROBES = 16
"""Number of samples that are read to find out whether a dataset is random."""
LEAVES = (int, float, str, bytes, type(None), torch.Tensor, np.ndarray, ModuleType, type, BuiltinFunctionType)
MAX_ELEMENTS = 1000
"""Larger containers are not searched for generators; they hold data, such as a list of a million files."""
MAX_SEARCHED = 20_000
"""Number of objects that are searched for generators."""
CALLED = ("__getitem__", "__getitems__", "__call__", "forward")
"""Methods whose global variables are searched for generators."""
STATES: dict[type, tuple[Any, Any]] = {  # how the state of a generator is read and written
    torch.Generator: (  # as bytes, because the pickles of two equal tensors differ
        lambda generator: generator.get_state().numpy().tobytes(),
        lambda generator, state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}


class RandomSampleError(ConfigError):
    """A sample that would be kept in one version is random.

    Args:
        index: of the sample in its dataset.
        reason: which generator it uses, or that it differs.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index

    def __str__(self) -> str:
        return "sample {} is random ({})".format(*self.args)


class Generators:
    """The global random generators, and those that some objects refer to."""

    def __init__(self, *owners: Any) -> None:
        self._objects = [value for value in _reachable(owners) if type(value) in STATES]

    def states(self) -> Any:
        """The states of all; for `restore` and `changed`."""
        return generator_states(), self._states()

    def _states(self) -> list[Any]:
        return [STATES[type(generator)][0](generator) for generator in self._objects]

    def restore(self, states: Any) -> None:
        """Set the generators that belong to objects; `preserved_generators` restores the global ones."""
        for generator, state in zip(self._objects, states[1], strict=True):
            STATES[type(generator)][1](generator, state)

    def changed(self, before: Any) -> list[str]:
        """The names of the generators whose states are not as they were."""
        pairs = zip(self._objects, before[1], self._states(), strict=True)
        used = [generator for generator, *states in pairs if len(set(map(pickle.dumps, states))) > 1]
        return changed_generators(before[0]) + [f"a {type(generator).__name__} of its own" for generator in used]


@contextmanager
def preserved_random_state(*owners: Any) -> Iterator[None]:
    """Restore the global generators, and those that some objects refer to, on exit."""
    generators = Generators(*owners)
    states = generators.states()
    with preserved_generators():
        try:
            yield
        finally:
            generators.restore(states)


def call_watched(function: Callable[[], Any], owners: Any, *, again: bool) -> tuple[Any, str | None]:
    """The result of a function, and why it is random; None if it is not.

    A function that uses a generator is called again, from the state in which the first call has left the generator. If
    both calls end in the same state with equal results, the function seeds itself.

    Args:
        owners: what may have generators of its own.
        again: call the function twice in any case, to compare the results.
    """
    generators = Generators(owners)
    before = generators.states()
    result = function()
    used = generators.changed(before)
    if not (used or again):
        return result, None
    before = generators.states()
    difference = find_difference(function(), result)
    if used and generators.changed(before):
        return result, f"it draws from {', '.join(used)}"
    return result, "it differs when it is read again" if difference else None


def probe_indices(size: int) -> list[int]:
    """Evenly spread indices of the samples that are read to find out whether a dataset is random."""
    return sorted({probe * size // PROBES for probe in range(PROBES)}) if size else []


def read_probes(read: Callable[[int], Any], indices: Iterable[int], owners: Any) -> list[Any]:
    """Samples; raises `RandomSampleError` for a random one. The first is read twice and compared."""
    samples: list[Any] = []
    for index in indices:
        sample, reason = call_watched(partial(read, index), owners, again=not samples)
        if reason:
            raise RandomSampleError(index, reason)
        samples.append(sample)
    return samples


@contextmanager
def refusing_random(read: Callable[[int], Any], indices: Sequence[int], owners: Any) -> Iterator[None]:
    """Raise `RandomSampleError` if one of the samples that the block reads is random.

    Generators are compared once for all samples; only if one has been used, the samples are read again, one by one.
    """
    generators = Generators(owners)
    before = generators.states()
    yield
    if generators.changed(before):
        for index in indices:
            _, reason = call_watched(partial(read, index), owners, again=False)
            if reason:
                raise RandomSampleError(index, reason)


def _reachable(owners: Iterable[Any]) -> Iterable[Any]:
    """The objects that others refer to, breadth first."""
    reached: dict[int, Any] = {}
    waiting = deque(owners)
    while waiting and len(reached) < MAX_SEARCHED:
        value = waiting.popleft()
        if isinstance(value, LEAVES) or id(value) in reached:
            continue
        reached[id(value)] = value
        waiting.extend(_referents(value))
    return reached.values()


def _referents(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = value.values() if isinstance(value, dict) else value
        return parts if len(value) <= MAX_ELEMENTS else ()
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        try:
            variables = inspect.getclosurevars(value)
        except ValueError:  # a variable of the enclosing function has no value yet
            return ()
        return (*variables.nonlocals.values(), *variables.globals.values(), *(value.__defaults__ or ()))
    of_class = [pair for kind in type(value).__mro__ for pair in vars(kind).items()]
    called = [part for name, part in of_class if name in CALLED and isinstance(part, FunctionType)]
    generators = [part for _, part in of_class if type(part) in STATES]
    return (*getattr(value, "__dict__", {}).values(), *generators, *called)


GENERATORS = ("torch", "NumPy", "Python")
GeneratorStates = tuple[torch.Tensor, Any, Any]


def read_samples(dataset: Dataset[Any], indices: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """Read samples of a map-style dataset, seeding the global generators before each; restores their state.

    The generators are those of torch (CPU), NumPy and Python, so what torchvision's transforms draw depends on (seed,
    epoch, index) alone: not on the worker, nor on what was read before. A dataset with its own generator is outside
    of this promise.

    Raises:
        RuntimeError: a sample raised `StopIteration`.
    """
    with preserved_generators():
        samples = []
        for index in indices:
            seed_generators(seed, epoch, index)
            samples.append(read_sample(dataset, index))
        return samples


def read_sample(dataset: Dataset[Any], index: int) -> Any:
    """A sample; raises `RuntimeError` for a `StopIteration`, as of a stray `next()`, which would end the epoch."""
    try:
        return dataset[index]
    except StopIteration as error:
        raise RuntimeError(f"sample {index} of the dataset raised StopIteration") from error


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python from a hash of the three numbers; takes 10 µs."""
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=20).digest()
    torch_seed, numpy_seed, python_seed = struct.unpack("<QIQ", digest)
    # Not torch.manual_seed, which also seeds the generators of every accelerator: 230 µs.
    torch.default_generator.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


def generator_states() -> GeneratorStates:
    """The states of the global generators of torch (CPU), NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def changed_generators(before: GeneratorStates) -> list[str]:
    """The names of the global generators whose state is not as it was."""
    now = generator_states()
    # repr() would shorten NumPy's array; its position counts too, because one draw seldom changes the array.
    are_equal = (
        torch.equal(before[0], now[0]),
        all(np.array_equal(*pair) for pair in zip(before[1], now[1], strict=True)),
        before[2] == now[2],
    )
    return [name for name, is_equal in zip(GENERATORS, are_equal, strict=True) if not is_equal]


def draw_from_generators() -> np.ndarray[Any, np.dtype[np.float64]]:
    """A number from each of the global generators, `[3]` in the order of `GENERATORS`."""
    return np.array([torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random()])


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch (on the CPU and on `device`), NumPy and Python on exit."""
    _, numpy_state, python_state = generator_states()
    with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
