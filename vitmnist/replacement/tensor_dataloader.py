"""The `DataLoader` of transforms="tensor": parameters are drawn in the order of its workers, and applied in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vitmnist.data.sources import collate_with
from vitmnist.errors import error_context
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, FetchedBatch, TransformedDataset
from vitmnist.replacement.split_transforms import Transform, apply, with_results
from vitmnist.replacement.tensor_transforms import (
    AsV2,
    Normalize,
    Shape,
    ToFloat,
    draw,
)
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts, ordered_map
from vitmnist.store.tree import map_tensors

# So many batches are made while the script computes. Samplers are read as far ahead as for the original's workers.
AHEAD = 2


class DrawnPicture(NamedTuple):
    """A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""

    image: Tensor
    steps: Sequence[Transform]
    shape: Shape


class DrawnSample(NamedTuple):
    """The index of a sample, the sample with placeholders, and its pictures."""

    sample_index: int
    decoded: object
    pictures: list[DrawnPicture]


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each attribute of the original.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, transforms: Sequence[Sequence[Transform]], threads: int) -> None:
        super().__init__(*args)
        vars(self).update(_transforms=transforms, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> DrawnBatch:
        """Draws the random parameters of a batch, from torch's generator."""
        transforms = [
            [step.build() if isinstance(step, AsV2) else step for step in steps] for steps in self._transforms
        ]
        samples: list[DrawnSample] = []
        for index in indices:
            with error_context(f"sample {index}"):
                decoded, calls = self._samples.load(index, as_views=True)
                pictures = [
                    DrawnPicture(image, *draw(transforms[attribute], tuple(image.shape)))
                    for attribute, (image,) in calls
                ]
                samples.append(DrawnSample(index, decoded, pictures))
        # Memory is allocated in the consumer's thread, because glibc returns that of threads that end with an epoch.
        batches = [
            torch.empty((len(pictures), *pictures[0].shape), device="cpu")
            for pictures in zip(*(sample.pictures for sample in samples), strict=True)
        ]
        return DrawnBatch(samples, batches, 1 if get_worker_info() else max(torch.get_num_threads(), self._threads))


class DrawnBatch(FetchedBatch):
    """The samples of a batch before their transforms are applied, in threads.

    Args:
        batches: for the pictures of each call, not filled yet. Pictures are made in their rows, so none is copied.
    """

    def __init__(self, samples: Sequence[DrawnSample], batches: Sequence[Tensor], threads: int) -> None:
        self.samples, self.batches, self.threads = samples, batches, threads

    @property
    def content(self) -> object:
        """The batch that torch's `default_collate` makes of the finished samples."""
        rows_of_calls = [list(batch) for batch in self.batches]
        samples: list[Any] = [None] * len(self.samples)

        def make(span: slice) -> None:
            for position in range(*span.indices(len(samples))):
                index, decoded, pictures = self.samples[position]
                with error_context(f"sample {index}"):
                    pairs = zip(pictures, rows_of_calls, strict=True)
                    results = [(_transformed(picture, rows[position]),) for picture, rows in pairs]
                samples[position] = with_results(decoded, results)

        def stack(tensors: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
            """`torch.stack`, but tensors that are the rows of a batch already are that batch."""
            for batch, rows in zip(self.batches, rows_of_calls, strict=True):
                if all(row is tensor for row, tensor in zip(rows, tensors, strict=True)):
                    return batch
            return torch.stack(tensors)

        in_parts(make, len(samples), 1, self.threads)
        return collate_with({Tensor: stack}, samples)


def _transformed(picture: DrawnPicture, row: Tensor) -> Tensor:
    """A picture after its transforms, in the row of the batch if that has its shape and dtype."""
    image = picture.image
    for transform in picture.steps:
        fits = isinstance(transform, ToFloat) or (isinstance(transform, Normalize) and image.dtype == row.dtype)
        if fits and image.shape == row.shape:
            image = transform(image, out=row)
        else:
            (image,) = apply([transform], (image,))
    if image is not row and (image.shape, image.dtype) == (row.shape, row.dtype):
        row.copy_(image)
        return row
    return image


class TensorDataLoader(DecodedDataLoader):
    """Makes batches in threads where torch's generator alone decides what its workers would make.

    A framework that builds another kind of DataLoader from its arguments gets the same batches from workers.
    """

    persistent: tuple[list[Tensor], Iterator[object]] | None = None
    """What persistent workers would continue: the states of their generators, and batches that are not drawn yet."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Draws at once what torch draws in this call, from samplers too: the indices that workers get in advance."""
        depends_on_workers = not self.in_order or self.worker_init_fn is not None
        if not self.num_workers or depends_on_workers or not isinstance(self.dataset, DrawnDataset):
            return super().__iter__()
        self.check_transforms()
        sampler: Any = self.batch_sampler or self.sampler
        if self.persistent:
            states, draws = self.persistent
            deque(draws, maxlen=0)  # After a break, persistent workers draw all that they were sent.
        else:
            iter(sampler)  # torch makes an iterator that it does not use before it draws the seed.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            states = [torch.Generator().manual_seed(seed + worker).get_state() for worker in range(self.num_workers)]
        indices = iter(sampler)
        ahead = self.num_workers * (self.prefetch_factor or 0)
        sent = deque(islice(indices, ahead))
        draws = self._draw(states, sent)
        if self.persistent_workers:
            self.persistent = states, draws
        return _deliver(draws, sent, indices, min(AHEAD, ahead - 1))

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
                with torch.inference_mode(False):  # A batch may be used in another mode than the one before it.
                    make = partial(collate, dataset.__getitems__(sent.popleft()))
            except Exception as error:
                make = partial(_raise, error)
            finally:
                states[worker] = torch.get_rng_state()
                torch.set_rng_state(before)
            yield make

    def _pinned_batch(self, samples: list[Any]) -> object:
        batch = self.collate_fn(samples)
        return map_tensors(Tensor.pin_memory, batch) if torch.cuda.is_available() else batch


def _deliver(
    draws: Iterator[Callable[[], object]], sent: deque[list[int]], indices: Iterator[list[int]], ahead: int
) -> Generator[object, None, None]:
    """The batches that `draws` makes, in threads; after each, the indices of another one are sent."""
    with closing(ordered_map(lambda make: make(), draws, AHEAD, ahead)) as batches:
        for batch in batches:
            sent.extend(islice(indices, 1))
            yield batch


def _raise(error: Exception) -> NoReturn:
    raise error
