"""The datasets of the DataLoaders that `from_dataloader` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from vitmnist.data.batch_tensors import BatchTensors
from vitmnist.data.frozen_state import FrozenState
from vitmnist.data.samples import Samples
from vitmnist.errors import ConfigError

NEEDS_COLLATE = (
    "a DataLoader over it needs collate_fn=loader.collate_fn, of the loader that from_dataloader returned (in a "
    "Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False); .original of it is the "
    "dataset that gives samples"
)


@dataclass(frozen=True)
class Store:
    """Where decoded samples are kept; see `from_dataloader`."""

    name: str
    device: torch.device
    folder: Path
    fingerprint: str | None


class DecodedDataset(Dataset[Any]):
    """The samples of another dataset, decoded once.

    Attributes other than `original` and `sample_nbytes` are those of the original dataset, such as `classes`. Setting
    one of them, or changing one in the original, is an error at the next batch: the decoded samples do not follow it.

    Args:
        original: the dataset.
        state: of the original when it was decoded.
        size: number of samples.
        sample_nbytes: bytes that a decoded sample takes, on average.
    """

    def __init__(self, original: Any, state: FrozenState, size: int, sample_nbytes: float) -> None:
        self.__dict__.update(original=original, _state=state, _size=size, sample_nbytes=sample_nbytes)

    def __len__(self) -> int:
        return int(self.__dict__["_size"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["original"], name, value)


class GatheredDataset(DecodedDataset):
    """Samples that are rows of tensors, of which `DataLoader` gathers a batch at once."""

    def __init__(self, original: Any, state: FrozenState, batches: BatchTensors) -> None:
        size = len(next(iter(batches.tensors.values())))
        super().__init__(original, state, size, batches.sample_nbytes)
        self.__dict__["_batches"] = batches

    def __getitem__(self, index: int) -> Any:
        """A sample of the original; batches do not need it."""
        return self.original[index]

    def __getitems__(self, indices: Sequence[int]) -> GatheredBatch:
        """The batch of these samples, for the collate function of the replacement."""
        self._state.check()
        return GatheredBatch(self._batches.gather(indices))


class GatheredBatch:
    """A batch that is collated already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(f"a DecodedDataset gives collated batches: {NEEDS_COLLATE}")


class CollateGathered:
    """The collate function of a replacement: a batch that was gathered is handed on.

    Single samples, such as those of a `ConcatDataset`, are collated as before.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return samples.batch if isinstance(samples, GatheredBatch) else self.collate(samples)


class TransformedDataset(DecodedDataset):
    """Samples that are decoded once, and then get their random transforms each time that they are read.

    Args:
        transform: makes a sample of what is kept of it.
        unfinished: does the same, but leaves the last transforms to the collate function of the replacement.
    """

    def __init__(
        self,
        original: Any,
        state: FrozenState,
        samples: Samples,
        transform: Callable[[Any], Any],
        unfinished: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(original, state, len(samples), samples.nbytes / len(samples))
        self.__dict__.update(_samples=samples, _transform=transform, _unfinished=unfinished)

    def like(
        self, samples: Samples, transform: Callable[[Any], Any], unfinished: Callable[[Any], Any] | None = None
    ) -> TransformedDataset:
        """The same with other samples and transforms."""
        return TransformedDataset(self.original, self._state, samples, transform, unfinished)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._samples[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        self._state.check()
        transform = self._unfinished or self._transform
        samples = [transform(self._samples[index]) for index in indices]
        return UnfinishedSamples(samples) if self._unfinished else samples


class UnfinishedSamples:
    """Samples that lack their last transforms, for the collate function of the replacement."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(f"a DecodedDataset leaves the last transforms to batches: {NEEDS_COLLATE}")
