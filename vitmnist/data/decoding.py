"""Decoding a map-style data set of pairs (image, label) into two tensors, and refusing one with random samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitmnist.data.collate import collate_samples
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, DataError

CHUNK = 256  # samples decoded at a time
PROBES = 32  # samples compared between two epochs


def read_pairs(dataset: Dataset[Any], indices: Sequence[int], seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Samples (image, label) of a map-style data set as one batch: `[B, …]` and `[B, …]`.

    Raises:
        DataError: samples that are no such pairs, or of different shapes.
    """
    samples = read_samples(dataset, indices, seed, epoch)
    try:
        batch = collate_samples(samples)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"samples {indices[0]} to {indices[-1]} do not make a batch: {error}") from error
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        found = f"a {type(samples[0]).__name__}"
        if isinstance(samples[0], (tuple, list)):
            found += f" of {', '.join(type(value).__name__ for value in samples[0])}"
        raise DataError(
            f"sample {indices[0]} is no pair of an image and a label, but {found}; "
            "such samples are delivered by disk, and by prefetch of disk"
        )
    return batch[0], batch[1]


def iter_pairs(dataset: Dataset[Any], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of all samples (image, label) of a map-style data set, as in epoch 0.

    Raises:
        DataError: as `read_pairs`, or chunks of different shapes or dtypes.
    """
    size = len(dataset)  # type: ignore[arg-type]
    expected = None
    for start in range(0, size, CHUNK):
        chunk = read_pairs(dataset, range(start, min(start + CHUNK, size)), seed, epoch=0)
        found = [(part.dtype, list(part.shape[1:])) for part in chunk]
        expected = expected or found
        for (dtype, shape), (first_dtype, first_shape) in zip(found, expected, strict=True):
            if (dtype, shape) != (first_dtype, first_shape):
                raise DataError(
                    f"samples from {start} on are {dtype} {shape}, those before {first_dtype} {first_shape}"
                )
        yield chunk


def load_samples(dataset: Dataset[Any], seed: int) -> TensorSet:
    """All samples of a map-style data set of pairs (image, label), in memory.

    Raises:
        DataError: as `iter_pairs`, or there are no samples.
    """
    size = len(dataset)  # type: ignore[arg-type]
    tensors: tuple[Tensor, ...] = ()
    filled = 0
    for chunk in iter_pairs(dataset, seed):
        # Allocated at full size at once: concatenating chunks would need twice the memory.
        tensors = tensors or tuple(part.new_empty((size, *part.shape[1:])) for part in chunk)
        for tensor, part in zip(tensors, chunk, strict=True):
            tensor[filled : filled + len(part)] = part
        filled += len(chunk[0])
    if not tensors:
        raise DataError("the data set is empty")
    return TensorSet(*tensors)


def estimate_nbytes(dataset: Dataset[Any], seed: int) -> int:
    """The bytes that `load_samples` takes, estimated from the first sample."""
    size = len(dataset)  # type: ignore[arg-type]
    return sum(part.nbytes for part in read_pairs(dataset, [0], seed, epoch=0)) * size if size else 0


def refuse_random(loader: str, dataset: Dataset[Any], seed: int) -> None:
    """Raise `ConfigError` if samples are random: a loader that decodes once would repeat one version of them.

    Reads up to 32 evenly spread samples as epochs 0 and 1 have them. A transform that changes one sample in ten is
    missed once in a thousand times.
    """
    size = len(dataset)  # type: ignore[arg-type]
    for index in sorted({probe * size // PROBES for probe in range(PROBES)}) if size else ():
        first, second = (read_pairs(dataset, [index], seed, epoch) for epoch in (0, 1))
        if not all(_is_same(one, other) for one, other in zip(first, second, strict=True)):
            raise ConfigError(
                f"{loader}: sample {index} differs between epochs 0 and 1, and {loader} would repeat one version of "
                "it; choose disk or prefetch of disk, or augment batches on the device (data/augment); frozen=True "
                "keeps the version of epoch 0"
            )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality, so that a NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
