"""Sources from which loaders read samples by index. `as_source` selects one:

data                 source          ram, cache, gpu_slice           disk
pair of tensors      TensorSet       gather rows                     gathers rows in workers: `BatchDataset`
split                Split           gather rows                     reads files in threads: `FileLoader`, or in workers
map-style dataset    DatasetSource   `store_all` as a `TensorSet`    reads samples in workers: `BatchDataset`
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vitmnist.data.images import to_tensor
from vitmnist.data.random_samples import (
    RandomSampleError,
    choose_probes,
    has_set_epoch,
    read_probes,
    refuse_random_samples,
)
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.random_state import preserve_random_state, seed_generators
from vitmnist.store.read_in_chunks import MapStyleDataset, count_reading_workers, read_in_chunks
from vitmnist.store.rows import StoreOptions, gather_rows, store_rows

Tensors = TypeVar("Tensors", bound="TensorSet")
CHUNK_SIZE = 1024
"""Number of samples of a `TensorSet` to write or hash at a time."""


@dataclass(frozen=True)
class TensorSet:
    """Images and labels as two tensors with the same first dimension.

    Args:
        images: `[N, …]` of any dtype.
        labels: `[N, …]` of any dtype.
        is_mapped: the images are a memory-mapped file. The system reads its pages on demand.

    Raises:
        DataError: images or labels are not tensors, or have different lengths.
    """

    images: Tensor
    labels: Tensor
    _: KW_ONLY
    is_mapped: bool = False

    def __post_init__(self) -> None:
        for name, tensor in (("images", self.images), ("labels", self.labels)):
            if not isinstance(tensor, Tensor):
                raise DataError(f"{name}: must be a tensor or a NumPy array, found {type(tensor).__name__}")
            if not tensor.dim():
                raise DataError(f"{name}: must have a first dimension of samples, found a single value")
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images, but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Images and labels, detached from their graphs."""
        return self.images.detach(), self.labels.detach()

    def read(self, indices: slice | Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these indices, int64 `[B]`; they are the same in every epoch."""
        images, labels = gather_rows(self.tensors, indices)
        return images, labels

    def nbytes_to_copy(self, device: torch.device) -> int:
        """Return the bytes that a copy of all samples would allocate on a device; 0 if they are already there."""
        is_loaded = (self.images.device.type, self.images.device.index or 0) == (device.type, device.index or 0)
        return 0 if is_loaded and not self.is_mapped else self.nbytes

    def store_all(self, options: StoreOptions) -> TensorSet:
        """Store the images in host memory or in a file; raises the errors of `open_or_write_cache`."""
        if options.folder is None:
            return TensorSet(*(tensor.clone() for tensor in self.tensors)) if self.is_mapped else self
        self.check_on_host()
        if self.is_mapped or not len(self):
            return self
        fingerprint = f"{self.images.dtype} {list(self.images.shape)} {hash_tensor(self.images.detach())}"
        chunks = partial(zip, self.images.split(CHUNK_SIZE), self.labels.split(CHUNK_SIZE), strict=True)
        images, _ = store_rows(chunks, len(self), replace(options, fingerprint=fingerprint))
        return TensorSet(images, self.labels, is_mapped=True)  # Datasets with other labels share the file.

    def subset(self: Tensors, rows: slice | Tensor) -> Tensors:
        """Return the samples at these indices: views for a slice, copies in memory for int64 `[N]`."""
        images, labels = self.read(rows)
        return replace(self, images=images, labels=labels, is_mapped=self.is_mapped and isinstance(rows, slice))

    def check_on_host(self) -> None:
        """Raise `DataError` unless the tensors are in host memory."""
        for tensor in (self.images, self.labels):
            if tensor.device.type != "cpu":
                raise DataError(f"the tensors are on {tensor.device}, not in host memory; gpu_slice leaves them there")


def hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of the elements of a CPU tensor in logical order."""
    checksum = hashlib.sha256()
    for part in tensor.split(CHUNK_SIZE):  # A part with channels last is copied.
        checksum.update(part.contiguous().view(torch.uint8).numpy().data)
    return checksum.hexdigest()


class DatasetSource:
    """The samples of a map-style dataset. A random sample is a pure function of (seed, epoch, index).

    Args:
        seed: determines random samples; None if no sample is random.
    """

    def __init__(self, dataset: MapStyleDataset, seed: int | None = 0) -> None:
        self.dataset: Any = dataset  # Torch has no type for datasets with a length.
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: slice | Tensor, epoch: int = 0) -> object:
        """Read and collate the samples at a slice, or with the IDs int64 `[B]`; raises `DataError` if that fails."""
        sample_ids = range(len(self))[indices] if isinstance(indices, slice) else indices.tolist()
        if self.seed is None:
            return collate_samples([self.dataset[index] for index in sample_ids], sample_ids)
        return collate_samples(read_samples(self.dataset, sample_ids, self.seed, epoch), sample_ids)

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples in order, for storing. They must have the same shapes and dtypes."""
        expected, count = None, 0
        workers = count_reading_workers(self.dataset)
        sample_nbytes = self.nbytes_to_copy(torch.device("cpu")) / len(self) if workers and len(self) else 0
        for chunk in read_in_chunks(self.dataset, self._read_fixed, sample_nbytes, workers):
            signature = [f"{part.dtype} {list(part.shape[1:])}" for part in chunk]
            expected = expected or signature
            if signature != expected:
                raise DataError(
                    f"samples from {count} on are {' and '.join(signature)}, those before {' and '.join(expected)}"
                )
            count += len(chunk[0])
            yield chunk

    def _read_fixed(self, indices: range) -> tuple[Tensor, Tensor]:
        """Collate some samples; raise `ConfigError` if one of them is random."""
        read = self.dataset.__getitem__
        try:
            with preserve_random_state(self.dataset):
                for index in indices[:1] if indices.start else choose_probes(len(self)):
                    _, random_sample = read_probes(read, [index], self.dataset)
                    if random_sample:
                        raise random_sample
                with refuse_random_samples(read, indices, self.dataset):
                    batch = collate_samples([read(index) for index in indices], indices)
                    return _unpack_pair(batch, indices.start)
        except RandomSampleError as error:
            raise ConfigError(
                f"{error}, and a loader that decodes once would repeat one version of it; choose disk or prefetch of "
                "disk, or augment batches on the device (data/augment)"
            ) from error

    def nbytes_to_copy(self, device: torch.device) -> int:
        """Return an estimate from the first sample."""
        return sum(part.nbytes for part in _unpack_pair(self.read(slice(1)), 0)) * len(self) if len(self) else 0

    def store_all(self, options: StoreOptions) -> TensorSet:
        """Store all samples as tensors in host memory or in a file.

        Raises:
            ConfigError: a sample is random.
            DataError: a sample is not a pair of an image and a label, samples have different shapes or dtypes, or the
                file cannot be written.
            OutOfSpaceError: the disk has too little room.
        """
        images, labels = store_rows(self._chunks, len(self), options)
        return TensorSet(images, labels, is_mapped=options.folder is not None)


SampleSource = TensorSet | DatasetSource
"""The samples of a loader. Both types have `read`, `store_all` and `nbytes_to_copy`."""
Data = SampleSource | Dataset[Any] | Sequence[Tensor | np.ndarray[Any, Any]]
"""A split, a map-style dataset, or a pair of tensors or arrays."""


def as_source(data: Data, seed: int = 0) -> SampleSource:
    """Return a source of samples. Random ones depend on the seed. Raises `DataError` for data that cannot be used."""
    if isinstance(data, SampleSource):
        return data
    if isinstance(data, (tuple, list)):
        if len(data) != 2:
            raise DataError(f"a pair (images, labels) has two tensors, this one {len(data)}")
        return TensorSet(*map(as_tensor, ("images", "labels"), data))
    if isinstance(data, (IterableDataset, Mapping, Tensor)) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        raise DataError(
            f"{type(data).__name__} is neither a split, nor a pair of tensors, nor a map-style dataset (with "
            "__getitem__ and __len__); pass one split of a dataset with several"
        )
    if has_set_epoch(data):
        raise DataError("the dataset or a part of it has set_epoch, so its samples change; use a DataLoader of torch")
    return DatasetSource(data, seed)  # type: ignore[arg-type]  # torch has no protocol for it


def as_tensor(name: str, values: Any) -> Any:
    """Return a NumPy array as a tensor that shares its memory, and anything else unchanged."""
    if not isinstance(values, np.ndarray):
        return values
    try:
        with warnings.catch_warnings():
            # Torch warns that writing to a read-only array is undefined. Loaders do not write.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: torch cannot use this array: {error}") from error


def read_samples(dataset: Dataset[Any], sample_ids: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """Read samples of a map-style dataset. Seeds `GLOBAL_GENERATORS` before each, and restores their states.

    The random numbers of torchvision's transforms therefore depend on (seed, epoch, ID) alone, not on the worker or on
    the samples that it has read before. A dataset with another generator is not covered. The IDs are the sampler's.
    """

    def read() -> Iterator[Any]:
        for sample_id in sample_ids:
            seed_generators(seed, epoch, sample_id)
            yield dataset[sample_id % len(dataset)]  # type: ignore[arg-type]  # torch has no protocol for it

    with preserve_random_state():
        # In a generator, Python replaces a `StopIteration` of the dataset, which would end the epoch without an error.
        return list(read())


def _unpack_pair(batch: object, first: int) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a batch; raises `DataError` if it has other parts."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    parts = ", ".join(type(part).__name__ for part in batch) if isinstance(batch, tuple | list) else ""
    raise DataError(
        f"samples from {first} on are no pairs of an image and a label: their batch is a {type(batch).__name__}"
        f"{parts and f' of {parts}'}; such samples are delivered by disk, and by prefetch of disk"
    )


def collate_samples(samples: Sequence[object], indices: Sequence[int]) -> object:
    """Collate samples as torch's `default_collate` does; PIL images become uint8 `[B, C, H, W]`.

    As in torch, nested tuples become lists. Samples that are tuples themselves make a tuple.

    Raises:
        DataError: torch cannot collate an object of this type, or tensors have different shapes.
    """
    try:
        batch = collate_with({Image.Image: lambda images, **_: torch.stack([*map(to_tensor, images)])}, samples)
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"samples {', '.join(map(str, indices[:3]))}, … do not make a batch: {error}; give them the same shape in "
            "a transform of the dataset, or use a DataLoader with a collate_fn that pads them"
        ) from error
    return tuple(batch) if isinstance(batch, list) and isinstance(samples[0], tuple) else batch


def collate_with(functions: dict[Any, Callable[..., object]], samples: Sequence[object]) -> object:
    """Collate samples as torch's `default_collate` does, with other functions for the objects of some types."""
    # The module is private, but the documentation of `default_collate` imports from it for such extensions.
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    return collate(samples, collate_fn_map={**default_collate_fn_map, **functions})
