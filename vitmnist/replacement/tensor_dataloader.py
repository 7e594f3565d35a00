"""The `DataLoader` of transforms="tensor", which makes batches in threads in place of worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from vitmnist.errors import ConfigError, DataError
from vitmnist.replacement.decoded_dataset import CollateGathered, DecodedDataLoader, TransformedDataset
from vitmnist.replacement.original import COMPARED_SIZE, check_same_batches, rebuilt, seeded_batch
from vitmnist.replacement.split_transforms import SplitTransforms
from vitmnist.replacement.tensor_transforms import (
    DrawnDataset,
    can_be_drawn,
    check_rounding,
    tensor_transforms,
)
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.tree import map_tensors

AHEAD = 2
"""Batches that are made while the script computes; samplers are read as far ahead as for the original's workers."""


def with_tensors(exact: DataLoader[Any], split: SplitTransforms, probes: Sequence[int]) -> DataLoader[Any]:
    """The replacement whose random transforms get tensors; they are drawn in order if their classes allow it.

    Args:
        exact: the replacement whose transforms get what they got before.

    Raises:
        ConfigError: the transforms, or the collate function, make something else of tensors.
    """
    dataset: Any = exact.dataset
    kept = dataset.original, dataset._guard, dataset._samples.with_tensors()
    transforms = [tensor_transforms(steps) for steps in split.random]
    make = partial(split.transform, random=transforms)
    in_workers = rebuilt(exact, TensorDataLoader, dataset=TransformedDataset(*kept, make))
    probes = probes[: exact.batch_size or COMPARED_SIZE]
    expected = seeded_batch(dataset, exact.collate_fn, probes)
    try:
        check_rounding(seeded_batch(in_workers.dataset, exact.collate_fn, probes), expected)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    # A collate function of the user may draw, or ask for its worker.
    if exact.collate_fn is not default_collate or not all(map(can_be_drawn, chain.from_iterable(transforms))):
        return in_workers
    drawn = DrawnDataset(*kept, make, transforms=transforms, threads=exact.num_workers)
    in_threads = rebuilt(exact, TensorDataLoader, dataset=drawn, collate_fn=CollateGathered(default_collate))
    try:
        check_same_batches(in_workers, in_threads)
    except DataError:  # torchvision draws otherwise for what is no picture
        return in_workers
    return in_threads


class TensorDataLoader(DecodedDataLoader):
    """Makes batches in threads where torch's generator alone decides what its workers would make.

    A framework that builds another kind of DataLoader from its arguments gets the same batches from workers.
    """

    persistent: tuple[list[Tensor], Iterator[object]] | None = None
    """What persistent workers would continue: the states of their generators, and batches that are not drawn yet."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draws at once what torch draws in this call."""
        is_drawn = isinstance(self.dataset, DrawnDataset)
        if is_drawn and self.num_workers and self.in_order and not self.worker_init_fn:
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
