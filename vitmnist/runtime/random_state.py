"""Captures, restores and seeds all random state: torch, CUDA, NumPy, Python, and generators in objects."""

import pickle
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from vitmnist.runtime.generator_search import StateAccess, find_generators

GLOBAL_GENERATORS: dict[str, StateAccess] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "NumPy": (np.random.get_state, np.random.set_state),
    "Python": (random.getstate, random.setstate),
}
"""The global generators that samples draw from, by name."""


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
        self._generators = [*self._global.items(), *find_generators(roots)]
        self._states = self._read()

    def _read(self) -> list[object]:
        return [read() for _, (read, _) in self._generators]

    def restore(self) -> None:
        """Set all generators to the states of the snapshot."""
        for (_, (_, write)), state in zip(self._generators, self._states, strict=True):
            write(state)

    def list_changed(self) -> list[str]:
        """List the names of the generators whose state has changed since the snapshot."""
        pairs = zip(self._generators, map(_to_bytes, self._states), map(_to_bytes, self._read()), strict=True)
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


def _to_bytes(state: object) -> bytes:
    # The pickle of a tensor contains its address.
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


@contextmanager
def preserve_random_state(*roots: object, device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of random generators on exit. Takes the arguments of `RandomState`."""
    state = RandomState(*roots, device=device)
    try:
        yield
    finally:
        state.restore()


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed `GLOBAL_GENERATORS` from a hash of the three numbers. This takes 10 µs."""
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=20).digest()
    torch_seed, numpy_seed, python_seed = struct.unpack("<QIQ", digest)
    # torch.manual_seed would also seed the generators of every accelerator, in 230 µs.
    torch.default_generator.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


def seed_rank(seed: int, rank: int) -> None:
    """Seed the global generators of a rank for training."""
    if rank:
        # Ranks need different dropout. `seed + rank` would collide with the seed of another run. The sampler uses the
        # keys (epoch,), and the augmentation the keys (epoch, 1).
        seed = int(np.random.SeedSequence(seed, spawn_key=(rank, 2)).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
