"""Decoding a map-style data set of pairs (image, label) into two tensors, and refusing one that is random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitmnist.data.collate import collate_samples
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, DataError


def read_pairs(dataset: Dataset[Any], indices: Sequence[int], seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Samples (image, label) of a map-style data set as one batch: `[B, …]` and `[B, …]`.

    Raises:
        DataError: samples that are no such pairs, or that differ in their shapes.
    """
    samples = read_samples(dataset, indices, seed, epoch)
    try:
        batch = collate_samples(samples)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"samples {indices[0]} to {indices[-1]} do not make a batch: {error}") from error
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(a, Tensor) for a in batch)):
        raise DataError(
            f"sample {indices[0]} is no pair of an image and a label, but {_outline(samples[0])}; "
            "such samples are delivered by disk, and by prefetch of disk"
        )
    return batch[0], batch[1]


def pairs(dataset: Dataset[Any], seed: int, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples of a map-style data set of pairs (image, label) as epoch 0 has them, `size` at a time.

    Raises:
        DataError: as `read_pairs`.
    """
    if isinstance(dataset, SharedSamples) and dataset.is_decoded:
        yield from zip(dataset.arrays.images.split(size), dataset.arrays.labels.split(size), strict=True)
        return
    count = len(dataset)  # type: ignore[arg-type]
    for start in range(0, count, size):
        yield read_pairs(dataset, range(start, min(start + size, count)), seed, epoch=0)


def load_samples(dataset: Dataset[Any], seed: int) -> TensorSet:
    """All samples of a map-style data set of pairs (image, label), in memory.

    Raises:
        DataError: as `read_pairs`, or there is no sample.
    """
    if isinstance(dataset, SharedSamples):
        return dataset.arrays
    count = len(dataset)  # type: ignore[arg-type]
    arrays: tuple[Tensor, ...] = ()
    filled = 0
    for chunk in pairs(dataset, seed):
        arrays = arrays or tuple(array.new_empty((count, *array.shape[1:])) for array in chunk)
        for whole, array in zip(arrays, chunk, strict=True):
            if (whole.shape[1:], whole.dtype) != (array.shape[1:], array.dtype):
                raise DataError(
                    f"samples from {filled} on are {array.dtype} {list(array.shape[1:])}, "
                    f"those before {whole.dtype} {list(whole.shape[1:])}"
                )
            whole[filled : filled + len(array)] = array
        filled += len(chunk[0])
    if not arrays:
        raise DataError("the data set is empty")
    return TensorSet(*arrays)


def size_of_samples(dataset: Dataset[Any], seed: int) -> int:
    """The bytes that `load_samples` takes, judged by the first sample."""
    count = len(dataset)  # type: ignore[arg-type]
    return sum(array.nbytes for array in read_pairs(dataset, [0], seed, epoch=0)) * count if count else 0


class SharedSamples(Dataset[Any]):
    """A map-style data set that several loaders are built for: what one of them decodes, the others use."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @cached_property
    def arrays(self) -> TensorSet:
        """The decoded samples; raises as `load_samples`."""
        return load_samples(self.dataset, self._seed)

    @property
    def is_decoded(self) -> bool:
        """Whether a loader has decoded the samples."""
        return "arrays" in vars(self)

    @cached_property
    def random_sample(self) -> int | None:
        """See the function of this name."""
        return random_sample(self.dataset, self._seed)


PROBES = 32


def random_sample(dataset: Dataset[Any], seed: int) -> int | None:
    """The first sample found to differ between epochs 0 and 1; None if there is none.

    Reads up to 32 samples twice, evenly spread over the set. A transform that changes one sample in ten is missed once
    in a thousand times.
    """
    if isinstance(dataset, SharedSamples):
        return dataset.random_sample
    count = len(dataset)  # type: ignore[arg-type]
    for index in sorted({probe * count // PROBES for probe in range(PROBES)}) if count else ():
        first, second = (read_pairs(dataset, [index], seed, epoch) for epoch in (0, 1))
        if any(not _same_bytes(*both) for both in zip(first, second, strict=True)):
            return index
    return None


def refuse_random(loader: str, dataset: Dataset[Any], seed: int) -> None:
    """Raise `ConfigError` if samples are random: a loader that decodes once would repeat one version."""
    index = random_sample(dataset, seed)
    if index is not None:
        raise ConfigError(
            f"{loader}: sample {index} differs between epochs 0 and 1, and {loader} would repeat one version of it; "
            "choose disk or prefetch of disk, or augment batches on the device (data/augment); frozen=True keeps the "
            "version of epoch 0"
        )


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality, for which a NaN equals itself."""
    same_form = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same_form and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _outline(sample: Any) -> str:
    if isinstance(sample, (tuple, list)):
        return f"a {type(sample).__name__} of {', '.join(type(value).__name__ for value in sample)}"
    return f"a {type(sample).__name__}"
