"""Reads all samples of a dataset once, in worker processes where that is possible."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from tqdm import tqdm

from vitmnist.errors import DataError, UserError, describe_error
from vitmnist.runtime.cpu import available_cores

CHUNK_NBYTES, MAX_CHUNK = 2**22, 256  # The largest chunk that a worker hands over: it must fit into /dev/shm.
CHUNKS_PER_WORKER = 32  # At least this many, so that all workers finish together.

Chunk = TypeVar("Chunk")
Batch = TypeVar("Batch")


class MapStyleDataset(Protocol):
    """What torch calls a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def read_once(
    dataset: MapStyleDataset,
    read: Callable[[range], Chunk],
    sample_nbytes: float,
    workers: int = 0,
    context: object = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Iterator[Chunk]:
    """What `read` makes of consecutive samples, up to the end of a map-style dataset; shows a progress bar.

    Args:
        read: called with a range of indices, in a worker.
        sample_nbytes: by which the size of a chunk is chosen.
        workers: processes that read; see `reading_workers`.
        context: the `multiprocessing_context` of a DataLoader.
        worker_init_fn: as for a DataLoader. To it, the worker's dataset looks like `dataset`.

    Raises:
        UserError: what `read` raised; its other errors are a `DataError` if a worker has read.
    """
    size = len(dataset)
    largest = min(MAX_CHUNK, size // (CHUNKS_PER_WORKER * workers or 1), int(CHUNK_NBYTES / max(sample_nbytes, 1)))
    chunks = _Chunks(dataset, read, max(largest, 1))
    loader: Any = DataLoader(
        chunks,
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,
        worker_init_fn=worker_init_fn,
        generator=torch.Generator(),
        multiprocessing_context=context if workers else None,
    )
    loader.is_internal = True  # `vitmnist diagnose` observes only the user's loaders
    with tqdm(total=size, desc="decoding once", unit=" samples", leave=False, disable=None, delay=2) as progress:
        for chunk in loader:
            if isinstance(chunk, UserError):
                raise chunk
            yield chunk
            progress.update(min(chunks.chunk_size, size - progress.n))


def unchanged(batch: Batch) -> Batch:
    """The collate function of a DataLoader whose dataset makes whole batches; torch's own would convert arrays."""
    return batch


class WrappedDataset(Dataset[Any]):
    """Makes something else of the samples of the dataset `original`, and has its other attributes too."""

    original: MapStyleDataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # This object is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.original, name)


class _Chunks(WrappedDataset, Generic[Chunk]):
    """What `read` makes of some samples at a time."""

    def __init__(self, dataset: MapStyleDataset, read: Callable[[range], Chunk], chunk_size: int) -> None:
        self.original, self.read, self.chunk_size = dataset, read, chunk_size

    def __len__(self) -> int:
        return math.ceil(len(self.original) / self.chunk_size)

    def __getitem__(self, chunk: int) -> Chunk | UserError:
        indices = range(len(self.original))[chunk * self.chunk_size : (chunk + 1) * self.chunk_size]
        try:
            return self.read(indices)
        except UserError as error:  # Torch would turn a worker's traceback into the message.
            return error
        except Exception as error:
            if get_worker_info() is None:
                raise
            return DataError(describe_error(error))  # Torch would raise it without its type.


def reading_workers(dataset: MapStyleDataset, num_workers: int = 0) -> int:
    """As many workers as cores; none if the dataset may hold an open file, which forked processes cannot share.

    Args:
        num_workers: the number in the user's DataLoader, if there is one.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset  # type: ignore[assignment]  # torch's class has no length
    is_torchvision = any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)
    # A spawned process would import the script again. Asking for the method itself would fix it for the whole process.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return available_cores() if num_workers or (is_torchvision and method == "fork") else 0
