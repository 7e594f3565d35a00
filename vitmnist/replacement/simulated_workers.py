"""Batches that depend on the random numbers of workers, made in threads of this process."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from vitmnist.replacement.decoded_dataset import DecodedDataLoader, FetchedBatch
from vitmnist.replacement.drawn_dataset import DrawnDataset
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.tree import map_tensors

AHEAD = 2
"""Number of batches that are made while the script computes."""


class SimulatedWorkers:
    """Draws batches with the random generators that the workers of a `DataLoader` would have.

    Args:
        base_seed: the seed of the `DataLoader`; each worker adds its number.
        count: the number of workers.
    """

    def __init__(self, base_seed: int, count: int) -> None:
        seeds = [base_seed + worker for worker in range(count)]
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._sent: deque[tuple[list[int], int]] = deque()
        self._turns: Iterator[int] = iter(())

    def start_epoch(self, batches: Iterable[list[int]]) -> None:
        """Send the indices of the first batches, beginning with the first worker."""
        self._turns = cycle(range(len(self._states)))
        self.send(batches)

    def send(self, batches: Iterable[list[int]]) -> None:
        """Send the indices of more batches, each to the next worker."""
        self._sent.extend(zip(batches, self._turns, strict=False))

    def draw(self, dataset: DrawnDataset) -> Iterator[FetchedBatch]:
        """Draw the batches in the order in which they were sent, until none is left.

        Making a batch raises the error of drawing it.
        """
        while self._sent:
            indices, worker = self._sent.popleft()
            try:
                # A batch may be used in another inference mode than the one before it.
                with self._generator_of(worker), torch.inference_mode(False):
                    batch = dataset.__getitems__(indices)
            except Exception as error:
                batch = FetchedBatch(partial(_raise, error))
            yield batch

    @contextmanager
    def _generator_of(self, worker: int) -> Iterator[None]:
        """Use the state of a worker's generator in torch's global one."""
        state = torch.get_rng_state()
        torch.set_rng_state(self._states[worker])
        try:
            yield
        finally:
            self._states[worker] = torch.get_rng_state()
            torch.set_rng_state(state)


class ThreadedDataLoader(DecodedDataLoader):
    """Makes batches in threads where torch's generator alone decides what its workers would make.

    A framework that builds another kind of `DataLoader` from its arguments gets the same batches from workers.
    """

    _persistent: tuple[SimulatedWorkers, Iterator[FetchedBatch]] | None = None
    """The workers of the epoch before, if they persist, and the batches that they have not drawn yet."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draw at once what torch draws in this call, from samplers too: the indices that workers get in advance."""
        if not self._can_simulate_workers():
            return super().__iter__()
        self.check_transforms()
        sampler: Any = self.batch_sampler or self.sampler
        if self._persistent:
            workers, undrawn = self._persistent
            deque(undrawn, maxlen=0)  # After a break, persistent workers draw all that they were sent.
        else:
            iter(sampler)  # torch makes an iterator that it does not use before it draws the seed.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            workers = SimulatedWorkers(seed, self.num_workers)
        indices = iter(sampler)
        sent_ahead = self.num_workers * (self.prefetch_factor or 0)
        workers.start_epoch(islice(indices, sent_ahead))
        drawn = workers.draw(cast(DrawnDataset, self.dataset))
        if self.persistent_workers:
            self._persistent = workers, drawn
        batches = ordered_map(self._collate_and_pin, drawn, AHEAD, min(AHEAD, sent_ahead - 1))
        return _send_after_each(batches, workers, indices)

    def _can_simulate_workers(self) -> bool:
        """Whether there are workers, and nothing but the random transforms depends on them."""
        depends_on_workers = not self.in_order or self.worker_init_fn is not None
        return self.num_workers > 0 and not depends_on_workers and isinstance(self.dataset, DrawnDataset)

    def _collate_and_pin(self, fetched: Any) -> object:
        batch = self.collate_fn(fetched)
        if self.pin_memory and torch.cuda.is_available():
            return map_tensors(Tensor.pin_memory, batch)
        return batch


def _send_after_each(
    batches: ordered_map[FetchedBatch, object], workers: SimulatedWorkers, indices: Iterator[list[int]]
) -> Iterator[object]:
    """Yield batches; after each, the indices of another one are sent, as by a `DataLoader`."""
    with closing(batches):
        for batch in batches:
            workers.send(islice(indices, 1))
            yield batch


def _raise(error: Exception) -> NoReturn:
    raise error
