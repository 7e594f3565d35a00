"""The samples of a map-style dataset: read, decoded into two tensors, or refused because they are random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from vitmnist.data.collate import collate_samples
from vitmnist.data.sampler import as_tensor
from vitmnist.data.seeding import preserved_generators, read_samples
from vitmnist.data.tensors import SampleSource, TensorSet
from vitmnist.errors import ConfigError, DataError
from vitmnist.store.difference import find_difference
from vitmnist.store.rows import load_rows

CHUNK = 256  # samples decoded at a time
PROBES = 32  # samples compared between two epochs, or in batches of one
BATCHED = 4  # of them in a batch that is made twice


class DatasetSource(SampleSource):
    """The samples of a map-style dataset.

    Args:
        seed: of random samples; None if they are known not to be random.
    """

    def __init__(self, dataset: Dataset[Any], seed: int | None = 0) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch has no protocol for it

    def read(self, indices: slice | Tensor, epoch: int = 0) -> Any:
        """The samples collated; raises `DataError` if they make no batch."""
        rows = as_tensor(indices).tolist()
        if self.seed is None:
            samples = [self.dataset[row] for row in rows]
        else:
            samples = read_samples(self.dataset, rows, self.seed, epoch)
        try:
            return collate_samples(samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"samples {', '.join(map(str, rows[:3]))}, … do not make a batch: {error}; give them the same shape in "
                "a transform of the dataset, or use a DataLoader with a collate_fn that pads them"
            ) from error

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples as in epoch 0, which must have the same shapes and dtypes."""
        expected = None
        for start in range(0, len(self), CHUNK):
            chunk = self._read_pairs(slice(start, min(start + CHUNK, len(self))))
            found = [(part.dtype, list(part.shape[1:])) for part in chunk]
            expected = expected or found
            for (dtype, shape), (first_dtype, first_shape) in zip(found, expected, strict=True):
                if (dtype, shape) != (first_dtype, first_shape):
                    raise DataError(
                        f"samples from {start} on are {dtype} {shape}, those before {first_dtype} {first_shape}"
                    )
            yield chunk

    def in_memory(self) -> TensorSet:
        return TensorSet(*load_rows(self.chunks(), len(self)).tensors)

    def bytes_to_load(self, device: torch.device) -> int:
        """Estimated from the first sample."""
        return len(self) * sum(part.nbytes for part in self._read_pairs(slice(0, 1))) if len(self) else 0

    def part(self, span: slice) -> SampleSource:
        return DatasetSource(Subset(self.dataset, range(len(self))[span]), self.seed)

    def refuse_random(self, loader: str) -> None:
        if random := find_random(self.dataset, collate_samples, self.seed or 0):
            raise ConfigError(
                f"{loader}: {random} differs between epochs 0 and 1, and {loader} would repeat one version of it; "
                "choose disk or prefetch of disk, or augment batches on the device (data/augment)"
            )

    def _read_pairs(self, span: slice) -> tuple[Tensor, Tensor]:
        batch = self.read(span)
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
            return batch[0], batch[1]
        (sample,) = read_samples(self.dataset, [span.start], self.seed or 0, epoch=0)
        found = f"a {type(sample).__name__}"
        if isinstance(sample, (tuple, list)):
            found += f" of {', '.join(type(value).__name__ for value in sample)}"
        raise DataError(
            f"sample {span.start} is no pair of an image and a label, but {found}; "
            "such samples are delivered by disk, and by prefetch of disk"
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
