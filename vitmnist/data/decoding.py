"""Decoding a map-style dataset of pairs (image, label) into two tensors, and refusing one with random samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from vitmnist.data.collate import collate_samples
from vitmnist.data.difference import find_difference
from vitmnist.data.seeding import preserved_generators, read_samples
from vitmnist.errors import ConfigError, DataError

CHUNK = 256  # samples decoded at a time
PROBES = 32  # samples compared between two epochs, or in batches of one
BATCHED = 4  # of them in a batch that is made twice


def read_pairs(dataset: Dataset[Any], indices: Sequence[int], seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Samples (image, label) of a map-style dataset as one batch: `[B, …]` and `[B, …]`.

    Raises:
        DataError: samples that are no such pairs, or of different shapes.
    """
    samples = read_samples(dataset, indices, seed, epoch)
    batch = collate_named(samples, indices)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        found = f"a {type(samples[0]).__name__}"
        if isinstance(samples[0], (tuple, list)):
            found += f" of {', '.join(type(value).__name__ for value in samples[0])}"
        raise DataError(
            f"sample {indices[0]} is no pair of an image and a label, but {found}; "
            "such samples are delivered by disk, and by prefetch of disk"
        )
    return batch[0], batch[1]


def collate_named(samples: Sequence[Any], indices: Sequence[int]) -> Any:
    """A batch of samples with these indices; raises `DataError` if they make none."""
    try:
        return collate_samples(samples)
    except (TypeError, RuntimeError) as error:
        first = ", ".join(map(str, indices[:3]))
        raise DataError(
            f"samples {first}, … do not make a batch: {error}; give them the same shape in a transform of the dataset, "
            "or use a DataLoader with a collate_fn that pads them"
        ) from error


def iter_pairs(dataset: Dataset[Any], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of all samples (image, label) of a map-style dataset, as in epoch 0.

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


def load_chunks(chunks: Iterable[tuple[Tensor, ...]], size: int) -> tuple[Tensor, ...]:
    """Chunks of tensors, `size` samples in all, joined in memory; raises `DataError` if there are none."""
    tensors: tuple[Tensor, ...] = ()
    filled = 0
    for chunk in chunks:
        # Allocated at full size at once: concatenating chunks would need twice the memory.
        tensors = tensors or tuple(part.new_empty((size, *part.shape[1:])) for part in chunk)
        for tensor, part in zip(tensors, chunk, strict=True):
            tensor[filled : filled + len(part)] = part
        filled += len(chunk[0])
    if not tensors:
        raise DataError("the dataset is empty")
    return tensors


def refuse_random(loader: str, dataset: Dataset[Any], seed: int) -> None:
    """Raise `ConfigError` if samples are random: a loader that decodes once would repeat one version of them."""
    if random := find_random(dataset, collate_samples, seed):
        raise ConfigError(
            f"{loader}: {random} differs between epochs 0 and 1, and {loader} would repeat one version of it; "
            "choose disk or prefetch of disk, or augment batches on the device (data/augment)"
        )


def find_random(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int = 0) -> str | None:
    """What is random, a sample or how a batch is made of samples; None if nothing was found.

    Reads up to 32 evenly spread samples as epochs 0 and 1 have them. A transform that changes a sample with
    probability 0.1 is missed once in a thousand times.

    Args:
        collate: makes a batch of a list of samples, in which they are compared.
    """
    size = len(dataset)  # type: ignore[arg-type]
    probes = sorted({probe * size // PROBES for probe in range(PROBES)}) if size else []
    with preserved_generators():
        for index in probes:
            first, second = (collate(read_samples(dataset, [index], seed, epoch)) for epoch in (0, 1))
            if find_difference(first, second):
                return f"sample {index}"
        # Random mixing shows only in a batch of several samples, which may differ too much in size to make one.
        with suppress(Exception):
            samples = read_samples(dataset, probes[:BATCHED], seed, epoch=0)
            if find_difference(collate(samples), collate(samples)):
                return "the collate function"
    return None
