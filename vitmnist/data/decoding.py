"""The samples of a map-style dataset: read one by one, or decoded into two tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from vitmnist.data.channel_statistics import channel_statistics
from vitmnist.data.collate import collate_samples
from vitmnist.data.randomness import RandomSampleError, preserved_random_state, read_probes, refusing_random
from vitmnist.data.sampler import as_tensor
from vitmnist.data.seeding import read_sample, read_samples
from vitmnist.data.tensors import SampleSource, TensorSet
from vitmnist.errors import ConfigError, DataError
from vitmnist.store.rows import load_rows

CHUNK = 256
"""Number of samples decoded at a time."""


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
            return _collated([self.dataset[row] for row in rows], rows)
        return _collated(read_samples(self.dataset, rows, self.seed, epoch), rows)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples to be kept, which must have the same shapes and dtypes.

        Raises:
            ConfigError: a sample is random, and one version of it would be repeated; see `data.randomness` for what
                cannot be seen.
        """
        return self._chunks(self._read_fixed)

    def channel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return channel_statistics(images for images, _ in self._chunks(self.read))  # random samples have them too

    def _chunks(self, read: Callable[[slice], Any]) -> Iterator[tuple[Tensor, Tensor]]:
        expected = None
        for start in range(0, len(self), CHUNK):
            chunk = self._pairs(read(slice(start, min(start + CHUNK, len(self)))), start)
            signature = [(part.dtype, list(part.shape[1:])) for part in chunk]
            expected = expected or signature
            for (dtype, shape), (first_dtype, first_shape) in zip(signature, expected, strict=True):
                if (dtype, shape) != (first_dtype, first_shape):
                    raise DataError(
                        f"samples from {start} on are {dtype} {shape}, those before {first_dtype} {first_shape}"
                    )
            yield chunk

    def _read_fixed(self, span: slice) -> Any:
        """The samples of a span collated; raises `ConfigError` if one of them is random."""
        if self.seed is None:
            return self.read(span)
        rows, read = range(span.start, span.stop), partial(read_sample, self.dataset)
        try:
            with preserved_random_state(self.dataset):
                read_probes(read, rows[:1], self.dataset)
                with refusing_random(read, rows, self.dataset):
                    return _collated([read(row) for row in rows], rows)
        except RandomSampleError as error:
            raise ConfigError(
                f"{error}, and a loader that decodes once would repeat one version of it; choose disk or prefetch of "
                "disk, or augment batches on the device (data/augment)"
            ) from error

    def in_memory(self) -> TensorSet:
        return TensorSet(*load_rows(self.chunks(), len(self)).tensors)

    def bytes_to_load(self, device: torch.device) -> int:
        """Estimated from the first sample."""
        return sum(part.nbytes for part in self._pairs(self.read(slice(0, 1)), 0)) * len(self) if len(self) else 0

    def part(self, span: slice) -> SampleSource:
        return DatasetSource(Subset(self.dataset, range(len(self))[span]), self.seed)

    def _pairs(self, batch: Any, first: int) -> tuple[Tensor, Tensor]:
        """The images and labels of a batch; raises `DataError` with the kind of its first sample if it has others."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
            return batch[0], batch[1]
        (sample,) = read_samples(self.dataset, [first], self.seed or 0, epoch=0)
        kind = f"a {type(sample).__name__}"
        if isinstance(sample, (tuple, list)):
            kind += f" of {', '.join(type(value).__name__ for value in sample)}"
        raise DataError(
            f"sample {first} is no pair of an image and a label, but {kind}; "
            "such samples are delivered by disk, and by prefetch of disk"
        )


def _collated(samples: Sequence[Any], rows: Sequence[int]) -> Any:
    try:
        return collate_samples(samples)
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"samples {', '.join(map(str, rows[:3]))}, … do not make a batch: {error}; give them the same shape in "
            "a transform of the dataset, or use a DataLoader with a collate_fn that pads them"
        ) from error
