"""The `DataLoader` of transforms="tensor": batches on a device, and made in threads in place of worker processes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from vitmnist.data.sources import map_tensors
from vitmnist.replacement.decoded_dataset import DecodedDataLoader
from vitmnist.replacement.split_transforms import Transform, apply
from vitmnist.replacement.tensor_transforms import DrawnBatch, DrawnDataset
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.tree import flatten, unflatten

AHEAD = 2  # batches that are made while the script computes; the samplers of the original are as far ahead as ever


class TensorDataLoader(DecodedDataLoader):
    """Moves batches to `device`, which is set after construction, and finishes them there.

    Where torch's generator alone decides what its workers would make, threads make the batches in their place. A
    framework that builds another kind of DataLoader from its arguments gets the same batches from workers; one that
    builds this kind gets finished batches on the host.
    """

    device: torch.device | None = None
    draws: BatchDraws | None = None
    """Those of the last epoch, which persistent workers would continue."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draws at once what torch draws in this call."""
        if not isinstance(self.dataset, DrawnDataset):
            batches = super().__iter__()
            return map(partial(map_tensors, backend_of(self.device).to_device), batches) if self.device else batches
        dataset, original = self.dataset, self.collate_fn
        self.collate_fn = DrawnBatch.unfinished if self.device else original
        # A collate function of the user may draw, or ask for its worker.
        is_torchs = dataset.collate is default_collate and is_documented_seeding(self.worker_init_fn)
        try:
            batches = self._from_threads() if is_torchs and self.num_workers and self.in_order else super().__iter__()
        finally:
            self.collate_fn = original
        if self.device is None:
            return batches
        to_device = backend_of(self.device).to_device
        return (finished_on(to_device, dataset.trailing, *unfinished) for unfinished in batches)

    def _from_threads(self) -> Iterator[Any]:
        """Begin an epoch, with the indices of `prefetch_factor` batches for each worker, because samplers draw too."""
        self.check_transforms()
        sampler: Any = self.batch_sampler or self.sampler
        if self.draws is None or not self.persistent_workers:
            iter(sampler)  # torch makes one that it does not use, before it draws the seed
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            self.draws = BatchDraws(
                self.dataset, self.collate_fn, [seed + worker for worker in range(self.num_workers)]
            )
        for _ in self.draws:  # after a break, persistent workers draw all that they were sent
            pass
        indices = iter(sampler)
        self.draws.begin(islice(indices, self.num_workers * (self.prefetch_factor or 0)))
        return self._delivered(self.draws, indices)

    def _delivered(self, draws: BatchDraws, indices: Iterator[Any]) -> Generator[Any, None, None]:
        with closing(ordered_map(lambda make: make(), draws, AHEAD, AHEAD)) as batches:
            for batch in batches:
                draws.sent.extend(islice(indices, 1))
                is_pinned = self.pin_memory and torch.cuda.is_available()
                yield map_tensors(Tensor.pin_memory, batch) if is_pinned else batch


def finished_on(
    to_device: Callable[[Tensor], Tensor], trailing: Sequence[Transform], batch: Any, pictures: Sequence[int]
) -> Any:
    """A batch on a device, where those of its leaves that are pictures get their trailing transforms."""
    leaves, structure = flatten(batch)
    leaves = [map_tensors(to_device, leaf) for leaf in leaves]
    for position in pictures:
        (leaves[position],) = apply(trailing, (leaves[position],))
    return unflatten(leaves, structure)


class BatchDraws(Iterator[Callable[[], object]]):
    """Draws the samples of batches as worker processes would, each with a generator of its own.

    Yields what makes each batch, or raises in its place. Ends where nothing more has been sent, and may continue.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], object], seeds: list[int]) -> None:
        self._dataset, self._collate = dataset, collate
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self.sent: deque[list[int]] = deque()
        """The indices of batches that are not drawn yet."""

    def begin(self, indices: Iterator[list[int]]) -> None:
        """Begin an epoch with the first worker."""
        self.sent.extend(indices)
        self._drawn = 0

    def __next__(self) -> Callable[[], object]:
        if not self.sent:
            raise StopIteration
        worker, before = self._drawn % len(self._states), torch.get_rng_state()
        self._drawn += 1
        torch.set_rng_state(self._states[worker])
        try:
            with torch.inference_mode(False):  # a batch may be used in another mode than the one before it
                return partial(self._collate, self._dataset.__getitems__(self.sent.popleft()))
        except Exception as error:
            return partial(_raise, error)
        finally:
            self._states[worker] = torch.get_rng_state()
            torch.set_rng_state(before)


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
