"""The `DataLoader` of transforms="tensor": batches on a device, and made in threads in place of worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, dataloader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from vitmnist.data.collate import map_tensors
from vitmnist.replacement.drawn_samples import DrawnDataset
from vitmnist.runtime.device import backend_of

AHEAD = 2  # batches that are made while the script computes; the samplers of the original are as far ahead as ever
SEEDING = {"torch", "initial_seed", "np", "numpy", "random", "seed", "int"}  # the names in such a worker_init_fn


class TensorDataLoader(DataLoader[Any]):
    """Moves batches to `device`, which is set after construction, and finishes them there.

    Where torch's generator alone decides what its workers would make, there are none, but a `ThreadIterator`. A
    framework that builds another kind of DataLoader from its arguments gets the same batches from workers; one that
    builds this kind gets finished batches on the host.
    """

    device: torch.device | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        collate: Any = self.collate_fn
        if self.device is None:
            return super().__iter__()
        self.collate_fn = collate.unfinished
        try:
            batches = super().__iter__()  # draws its seed at once, as the original does
        finally:
            self.collate_fn = collate
        to_device = backend_of(self.device).to_device
        return (collate.finish(map_tensors(to_device, batch)) for batch in batches)

    def _get_iterator(self) -> Any:
        collate: Any = getattr(self.collate_fn, "__self__", self.collate_fn)
        if (
            self.num_workers
            and self.in_order
            and isinstance(self.dataset, DrawnDataset)
            and getattr(collate, "collate", None) is default_collate  # another may draw, or ask for its worker
            and seeds_others_only(self.worker_init_fn)
        ):
            return ThreadIterator(self)
        return super()._get_iterator()


class ThreadIterator(dataloader._BaseDataLoaderIter):
    """The batches of a `DataLoader` with workers, whose samples are drawn as in these and made in threads.

    The indices of `prefetch_factor` batches for each worker are read ahead, as torch does, because samplers draw too.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        seeds = [int(self._base_seed) + worker for worker in range(loader.num_workers)]
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._tasks = loader.num_workers * (loader.prefetch_factor or 0)
        self._sent: deque[list[int]] = deque()
        self._making: deque[Future[Any]] = deque()
        self._threads = ThreadPoolExecutor(AHEAD, "vitmnist-batches")
        self._reset(loader, first_iter=True)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        while self._sent:  # after a break, persistent workers draw all that they were sent
            self._draw()
        self._making.clear()
        super()._reset(loader, first_iter)
        self._drawn = 0
        for _ in range(self._tasks):
            self._send()

    def _send(self) -> None:
        if (indices := next(self._sampler_iter, None)) is not None:
            self._sent.append(indices)

    def _next_data(self) -> Any:
        while self._sent and len(self._making) <= AHEAD:
            self._making.append(self._threads.submit(self._draw()))
        if not self._making:
            raise StopIteration
        try:
            batch = self._making.popleft().result()
        finally:
            self._send()
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _draw(self) -> Callable[[], Any]:
        """Draw the next batch with the generator of its worker; returns what makes it, or raises in its place."""
        worker, before = self._drawn % self._num_workers, torch.get_rng_state()
        self._drawn += 1
        torch.set_rng_state(self._states[worker])
        try:
            with torch.inference_mode(False):  # a batch may be used in another mode than the one before it
                return partial(self._collate_fn, self._dataset.__getitems__(self._sent.popleft()))  # type: ignore[attr-defined]
        except Exception as error:
            return partial(_raise, error)
        finally:
            self._states[worker] = torch.get_rng_state()
            torch.set_rng_state(before)


def _raise(error: Exception) -> NoReturn:
    raise error


def seeds_others_only(function: Any) -> bool:
    """Whether a `worker_init_fn` only seeds NumPy's and Python's generators, which torchvision's transforms do not use.

    Such as the one of PyTorch's documentation on reproducibility. Any other may set up what its worker computes.
    """
    if not isinstance(function, FunctionType):
        return function is None
    code, numbers = function.__code__, {name for name, one in function.__globals__.items() if type(one) is int}
    return {*code.co_names} <= SEEDING | numbers and not (code.co_freevars or function.__defaults__)
