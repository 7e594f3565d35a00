"""Reads every sample of a dataset once, in worker processes if possible."""

import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from tqdm.auto import tqdm

from vitmnist.errors import ConfigError, DataError, UserError, format_error
from vitmnist.runtime.cpu import available_cores

MAX_CHUNK_NBYTES = 2**22
"""Maximum number of bytes in a chunk: a worker passes it through /dev/shm, which is small in containers."""
MAX_CHUNK_SIZE = 256
"""Maximum number of samples in a chunk."""
CHUNKS_PER_WORKER = 32
"""Minimum number of chunks per worker, so that all workers finish at about the same time."""

Chunk = TypeVar("Chunk")


class MapStyleDataset(Protocol):
    """A dataset with a length and an item for each index, as torch defines it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def read_in_chunks(
    dataset: MapStyleDataset,
    read: Callable[[range], Chunk],
    sample_nbytes: float,
    workers: int = 0,
    context: object = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Iterator[Chunk]:
    """Yield `read(indices)` for consecutive ranges that cover a dataset, and show a progress bar.

    Args:
        read: called in a worker if there are workers.
        sample_nbytes: the size of a sample; it limits the number of samples in a chunk.
        context: the `multiprocessing_context` of a DataLoader.
        worker_init_fn: the `worker_init_fn` of a DataLoader. It can read the attributes of `dataset`, but not set them.

    Raises:
        ConfigError: `worker_init_fn` sets an attribute.
        UserError: raised by `read`. Any other error in a worker becomes a `DataError`.
    """
    size = len(dataset)
    fair_size, largest_size = size // max(CHUNKS_PER_WORKER * workers, 1), int(MAX_CHUNK_NBYTES / max(sample_nbytes, 1))
    chunks = ChunkDataset(dataset, read, max(min(MAX_CHUNK_SIZE, fair_size, largest_size), 1))
    loader: DataLoader[Any] = DataLoader(
        chunks,
        batch_size=None,
        num_workers=workers,
        collate_fn=return_unchanged,
        worker_init_fn=worker_init_fn,
        generator=torch.Generator(),
        multiprocessing_context=context if workers else None,
    )
    with tqdm(total=size, desc="decoding once", unit=" samples", leave=False, disable=None, delay=2) as progress:
        for chunk in loader:
            if isinstance(chunk, UserError):
                raise chunk
            yield chunk
            progress.update(min(chunks.chunk_size, size - progress.n))


def return_unchanged(batch: Chunk) -> Chunk:
    """Collate a whole batch: return it unchanged. Torch's default would convert arrays."""
    return batch


class WrappedDataset(Dataset[Any]):
    """A dataset that wraps another one, `original`, and takes missing attributes from it."""

    original: MapStyleDataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # This object is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.original, name)


def refuse_attribute(name: str) -> ConfigError:
    """Return the error for setting an attribute of a dataset whose samples are decoded once."""
    return ConfigError(
        f"setting dataset.{name} does not change decoded samples; set it before from_dataloader or, if a "
        "worker_init_fn sets it, use the DataLoader as it is"
    )


class ChunkDataset(WrappedDataset, Generic[Chunk]):
    """A dataset of index ranges. `vitmnist diagnose` ignores loaders over this type."""

    def __init__(self, dataset: MapStyleDataset, read: Callable[[range], Chunk], chunk_size: int) -> None:
        self.read, self.chunk_size = read, chunk_size
        self.refusal: ConfigError | None = None
        self.original = dataset

    def __setattr__(self, name: str, value: object) -> None:
        if "original" in vars(self):  # Torch would replace the message of an error in `worker_init_fn` by a traceback.
            name, value = "refusal", refuse_attribute(name)
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return math.ceil(len(self.original) / self.chunk_size)

    def __getitem__(self, chunk: int) -> Chunk | UserError:
        indices = range(len(self.original))[chunk * self.chunk_size : (chunk + 1) * self.chunk_size]
        try:
            return self.refusal or self.read(indices)
        except UserError as error:  # If a worker raised it, torch would replace its message by a traceback.
            return error
        except Exception as error:
            if get_worker_info() is None:
                raise
            return DataError(format_error(error))  # Torch would not keep its type.


def count_reading_workers(dataset: MapStyleDataset, num_workers: int = 0) -> int:
    """Return the number of workers that can read a dataset: one per core, or 0 if it might hold an open file.

    Forked processes share the position of an open file. Torchvision's datasets hold no file, and neither does a dataset
    that the user already reads with workers.

    Args:
        num_workers: the number of workers in the user's DataLoader.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset  # type: ignore[assignment]  # torch's class has no length
    is_torchvision = any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)
    # A spawned process would import the user's script again. `allow_none=False` would fix the start method of the whole
    # process.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return available_cores() if num_workers or (is_torchvision and method == "fork") else 0
