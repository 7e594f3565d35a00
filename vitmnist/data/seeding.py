"""Random samples as a pure function of (seed, epoch, index)."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

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
