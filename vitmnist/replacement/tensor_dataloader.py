"""The `DataLoader` of transforms="tensor": batches on a device, and made in threads in place of worker processes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from vitmnist.data.sources import map_tensors
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, FetchedBatch
from vitmnist.replacement.drawn_transforms import DrawnDataset, DrawnSamples
from vitmnist.replacement.split_transforms import Transform, apply
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.tree import find_difference, flatten, named_leaves, unflatten

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
        collate: Any = self.collate_fn
        if self.device is None:
            return self._batches(collate)
        to_device = backend_of(self.device).to_device
        return (collate.finish(map_tensors(to_device, batch)) for batch in self._batches(collate.unfinished))

    def _batches(self, collate: Any) -> Iterator[Any]:
        """The batches on the host."""
        original: Any = self.collate_fn
        if (
            self.num_workers
            and self.in_order
            and isinstance(self.dataset, DrawnDataset)
            and getattr(original, "collate", None) is default_collate  # another may draw, or ask for its worker
            and is_documented_seeding(self.worker_init_fn)
        ):
            return self._from_threads(collate)
        self.collate_fn = collate
        try:
            return super().__iter__()
        finally:
            self.collate_fn = original

    def _from_threads(self, collate: Callable[[Any], Any]) -> Iterator[Any]:
        """Begin an epoch, with the indices of `prefetch_factor` batches for each worker, because samplers draw too."""
        sampler: Any = self.batch_sampler or self.sampler
        if self.draws is None or not self.persistent_workers:
            iter(sampler)  # torch makes one that it does not use, before it draws the seed
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            self.draws = BatchDraws(self.dataset, collate, [seed + worker for worker in range(self.num_workers)])
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


class BatchDraws(Iterator[Callable[[], Any]]):
    """Draws the samples of batches as worker processes would, each with a generator of its own.

    Yields what makes each batch, or raises in its place. Ends where nothing more has been sent, and may continue.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seeds: list[int]) -> None:
        self._dataset, self._collate = dataset, collate
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self.sent: deque[list[int]] = deque()
        """The indices of batches that are not drawn yet."""

    def begin(self, indices: Iterator[list[int]]) -> None:
        """Begin an epoch with the first worker."""
        self.sent.extend(indices)
        self._drawn = 0

    def __next__(self) -> Callable[[], Any]:
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


def is_documented_seeding(function: Any) -> bool:
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


BATCH_DIMS = 4
"""Dimensions of a batch of pictures, [B, C, H, W]."""
VALUES_AT_A_TIME = 2**19
"""Number of values that are transformed at a time on the CPU: they fit into its cache."""


@dataclass(frozen=True)
class DeferredTransforms:
    """Applies transforms to some of the tensors of a batch, by their paths in it, such as `['image']`."""

    paths: frozenset[str]
    transforms: Sequence[Transform]

    def __call__(self, batch: Any) -> Any:
        values = [self._finished(leaf) if path in self.paths else leaf for path, leaf in named_leaves(batch)]
        return unflatten(values, flatten(batch)[1])

    def _finished(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return apply(self.transforms, (images,))[0]  # type: ignore[no-any-return]
        finished, filled = images, 0
        for part in images.split(max(1, VALUES_AT_A_TIME * len(images) // max(1, images.numel()))):
            (result,) = apply(self.transforms, (part,))
            if not filled:
                finished = result.new_empty((len(images), *result.shape[1:]))
            finished[filled : filled + len(part)] = result
            filled += len(part)
        return finished


@dataclass(frozen=True)
class DeferredCollate:
    """A collate function that applies the last transforms of the samples to the whole batch.

    Args:
        dataset: whose samples lack their last transforms; others are only collated.
    """

    collate: Callable[[Any], Any]
    finish: DeferredTransforms
    dataset: Any

    def unfinished(self, samples: Any) -> Any:
        """The batch without the last transforms."""
        return self.collate(samples.content)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, FetchedBatch):
            return self.collate(samples)
        worker = get_worker_info()
        if not worker and isinstance(samples, DrawnSamples) and self.collate is default_collate:
            return samples.finished(self.finish.transforms)
        batch = self.unfinished(samples)
        # With another dataset, such as a Subset, code in the worker may use the batch.
        return DeferredBatch(batch, self.finish) if worker and worker.dataset is self.dataset else self.finish(batch)


@dataclass(frozen=True)
class DeferredBatch:
    """A batch that is finished when it is unpickled, so that only a quarter of the bytes leave the worker."""

    batch: Any
    finish: DeferredTransforms

    def __reduce__(self) -> tuple[DeferredTransforms, tuple[Any]]:
        return self.finish, (self.batch,)


def make_deferred(
    trailing: Sequence[Transform], batch: Any, finished: Any, exact: Any, of_tensors: bool
) -> DeferredTransforms:
    """The `DeferredTransforms` that applies the trailing transforms to a batch of samples without them.

    Args:
        batch: of samples without the trailing transforms.
        finished: of samples with them.
        exact: the original's batch; the result must have its dtypes and shapes, and without `of_tensors` its values.

    Raises:
        ConfigError: the batches differ.
    """
    pairs = list(zip(named_leaves(batch), flatten(finished)[0], strict=True))
    differing = {path: value for (path, value), other in pairs if find_difference(value, other)}
    if any(value.dim() != BATCH_DIMS for value in differing.values()):
        raise ConfigError("the collate function does not stack the pictures")
    finish = DeferredTransforms(frozenset(differing), trailing)
    if not of_tensors and find_difference(finish(batch), exact):
        raise ConfigError("values of the batch differ")
    for result, expected, other in zip(*(flatten(part)[0] for part in (finish(batch), finished, exact)), strict=True):
        if isinstance(other, Tensor) and not (
            (result.dtype, result.shape) == (expected.dtype, expected.shape) == (other.dtype, other.shape)
            and torch.allclose(result, expected, atol=1e-5, equal_nan=True)
        ):
            raise ConfigError(
                "values of the batch differ in dtype, shape or more than rounding from those of PIL images"
            )
    return finish
