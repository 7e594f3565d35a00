"""The `DataLoader` of transforms="tensor", which makes batches in threads in place of worker processes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vitmnist.replacement.decoded_dataset import DecodedDataLoader
from vitmnist.replacement.tensor_transforms import DrawnDataset
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.tree import map_tensors

AHEAD = 2  # batches that are made while the script computes; the samplers of the original are as far ahead as ever


class TensorDataLoader(DecodedDataLoader):
    """Makes batches in threads where torch's generator alone decides what its workers would make.

    A framework that builds another kind of DataLoader from its arguments gets the same batches from workers.
    """

    persistent: tuple[list[Tensor], Iterator[object]] | None = None
    """What persistent workers would continue: the states of their generators, and batches that are not drawn yet."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draws at once what torch draws in this call."""
        is_drawn = isinstance(self.dataset, DrawnDataset)
        if is_drawn and self.num_workers and self.in_order and is_documented_seeding(self.worker_init_fn):
            self.check_transforms()
            return self._from_threads()
        return super().__iter__()

    def _from_threads(self) -> Iterator[Any]:
        """Begin an epoch, with the indices of `prefetch_factor` batches for each worker, because samplers draw too."""
        sampler: Any = self.batch_sampler or self.sampler
        if self.persistent:
            states, draws = self.persistent
            for _ in draws:  # after a break, persistent workers draw all that they were sent
                pass
        else:
            iter(sampler)  # torch makes one that it does not use, before it draws the seed
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            states = [torch.Generator().manual_seed(seed + worker).get_state() for worker in range(self.num_workers)]
        indices = iter(sampler)
        ahead = self.num_workers * (self.prefetch_factor or 0)
        sent = deque(islice(indices, ahead))
        draws = self._draw(states, sent)
        if self.persistent_workers:
            self.persistent = states, draws
        return self._delivered(draws, sent, indices, min(AHEAD, ahead - 1))

    def _draw(self, states: list[Tensor], sent: deque[list[int]]) -> Iterator[Callable[[], object]]:
        """Draws the samples of batches as workers would, each with a generator of its own.

        Yields what makes each batch, or raises in its place, until nothing more has been sent.
        """
        dataset: Any = self.dataset
        collate = self._pinned_batch if self.pin_memory else self.collate_fn
        for worker in cycle(range(len(states))):
            if not sent:
                return
            before = torch.get_rng_state()
            torch.set_rng_state(states[worker])
            try:
                with torch.inference_mode(False):  # a batch may be used in another mode than the one before it
                    make = partial(collate, dataset.__getitems__(sent.popleft()))
            except Exception as error:
                make = partial(_raise, error)
            finally:
                states[worker] = torch.get_rng_state()
                torch.set_rng_state(before)
            yield make

    def _delivered(
        self, draws: Iterator[Callable[[], object]], sent: deque[list[int]], indices: Iterator[list[int]], ahead: int
    ) -> Generator[object, None, None]:
        with closing(ordered_map(lambda make: make(), draws, AHEAD, ahead)) as batches:
            for batch in batches:
                sent.extend(islice(indices, 1))
                yield batch

    def _pinned_batch(self, samples: list[Any]) -> object:
        batch = self.collate_fn(samples)
        return map_tensors(Tensor.pin_memory, batch) if torch.cuda.is_available() else batch


def _raise(error: Exception) -> NoReturn:
    raise error


def is_documented_seeding(function: object) -> bool:
    """Whether a `worker_init_fn` is None, or the `seed_worker` of https://docs.pytorch.org/docs/stable/notes/randomness.html.

    That one seeds NumPy's and Python's generators, which torchvision's transforms do not use. Any other may set up what
    its worker computes.
    """
    if not isinstance(function, FunctionType):
        return function is None
    return _names_and_numbers(function) == _names_and_numbers(_seed_worker)


def _names_and_numbers(function: Any) -> tuple[list[str], list[int]]:
    names = ["np" if name == "numpy" else name for name in function.__code__.co_names]
    return names, [constant for constant in function.__code__.co_consts if isinstance(constant, int)]


def _seed_worker(worker_id: int) -> None:
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)
