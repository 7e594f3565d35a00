"""Detects random samples, which must not be stored.

A sample is random if each read advances a generator, or a counter in an attribute of a dataset, a transform or a
collate function, or if a second read returns something else. The generators are the global ones of torch (CPU), NumPy
and Python, and those that are reachable from these objects: through attributes, containers, class attributes, and the
variables of methods and nested functions. Other sources, such as a `default_rng()` created for each sample, `secrets`
or a server, go undetected unless the sample is read twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch.utils.data import Sampler

from vitmnist.errors import ConfigError
from vitmnist.runtime.generator_search import find_reachable
from vitmnist.runtime.random_state import RandomState
from vitmnist.store.tree import find_difference

PROBES = 16
"""Number of samples to read to find out whether a dataset is random."""
Result = TypeVar("Result")


class RandomSampleError(ConfigError):
    """A sample is random, so storing it would repeat one version of it."""


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
    used = before.list_changed()
    if not (used or always_repeat):
        return result, None
    before = RandomState(roots)
    difference = find_difference(function(), result)
    if used and before.list_changed():
        return result, f"it draws from {', '.join(used)}"
    reason = "it differs when it is read again; if reading changes data in memory, build the dataset again"
    return result, reason if difference else None


def choose_probes(size: int) -> list[int]:
    """Return the indices of the samples, evenly spread, to read to find out whether a dataset is random."""
    return sorted({probe * size // PROBES for probe in range(PROBES)}) if size else []


def read_probes(
    read: Callable[[int], Result], indices: Iterable[int], roots: object
) -> tuple[list[Result], RandomSampleError | None]:
    """Read samples up to the first random one; return them, and its error if any. The first sample is read twice."""
    samples: list[Result] = []
    for index in indices:
        sample, reason = call_and_check_random(partial(read, index), roots, always_repeat=not samples)
        if reason:
            return samples, RandomSampleError(f"sample {index} is random ({reason})")
        samples.append(sample)
    return samples, None


@contextmanager
def refuse_random_samples(read: Callable[[int], object], indices: Sequence[int], roots: object) -> Iterator[None]:
    """Raise `RandomSampleError` if the block reads a random sample.

    Generators are compared once for all samples. Only if one was used are the samples read again, one by one.
    """
    before = RandomState(roots)
    yield
    if before.list_changed():
        _, random_sample = read_probes(read, indices, roots)
        if random_sample:
            raise random_sample


def has_set_epoch(dataset: object) -> bool:
    """Whether a dataset, a nested dataset or a transform has a method `set_epoch`, which changes its samples."""
    reachable = find_reachable([dataset])
    return any(hasattr(type(part), "set_epoch") and not isinstance(part, Sampler) for part in reachable)
