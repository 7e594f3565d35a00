"""The datasets of the DataLoaders that `from_dataloader` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from vitmnist.errors import ConfigError, naming
from vitmnist.replacement.batch_rows import BatchRows
from vitmnist.replacement.split_transforms import TransformGuard
from vitmnist.store.samples import Samples


class DecodedDataset(Dataset[Any]):
    """The samples of another dataset, decoded once.

    Attributes other than `original` and `sample_nbytes` are those of the original dataset, such as `classes`; setting
    one sets it there, and the decoded samples do not have the change.

    Args:
        original: the dataset.
        sample_nbytes: bytes that a decoded sample takes, on average.
        others: attributes of a subclass.
    """

    def __init__(self, original: Any, sample_nbytes: float = 0, **others: Any) -> None:
        self.__dict__.update(original=original, sample_nbytes=sample_nbytes, **others)

    def __len__(self) -> int:
        return len(self.original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["original"], name, value)


class DecodedDataLoader(DataLoader[Any]):
    """A `DataLoader` over decoded samples; `iter` raises `ConfigError` if a transform has changed since."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self.dataset, DecodedDataset):  # a framework may build one over another dataset, such as a Subset
            vars(self.dataset)["_guard"].check()
        return super().__iter__()


class FetchedBatch:
    """What a decoded dataset gives the collate function of its DataLoader.

    Args:
        content: a batch, or samples that lack their last transforms.
    """

    def __init__(self, content: Any) -> None:
        self.content = content

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(
            "a DataLoader over a DecodedDataset needs collate_fn=loader.collate_fn, of the loader that from_dataloader "
            "returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False)"
        )


class GatheredDataset(DecodedDataset):
    """Samples that are rows of tensors; `DataLoader` gets a whole batch by one gather."""

    def __init__(self, original: Any, guard: TransformGuard, batches: BatchRows) -> None:
        super().__init__(original, batches.sample_nbytes, _guard=guard, _batches=batches)

    def __getitem__(self, index: int) -> Any:
        """A sample of the original; batches do not need it."""
        return self.original[index]

    def __getitems__(self, indices: Sequence[int]) -> FetchedBatch:
        return FetchedBatch(self._batches.gather(indices))


class CollateGathered:
    """The collate function of a replacement: it passes on a batch that was gathered.

    Single samples, such as those of a `ConcatDataset`, are collated as before.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return samples.content if isinstance(samples, FetchedBatch) else self.collate(samples)


class TransformedDataset(DecodedDataset):
    """Samples that are decoded once, and then get their random transforms each time that they are read.

    Args:
        transform: makes a sample from what is kept of it.
        unfinished: does the same, but leaves the last transforms to the collate function of the replacement.
    """

    def __init__(
        self,
        original: Any,
        guard: TransformGuard,
        samples: Samples,
        transform: Callable[[Any], Any],
        unfinished: Callable[[Any], Any] | None = None,
    ) -> None:
        nbytes = samples.nbytes / len(samples)
        parts = {"_samples": samples, "_transform": transform, "_unfinished": unfinished}
        super().__init__(original, nbytes, _guard=guard, **parts)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._samples[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        transform = self._unfinished or self._transform
        samples = []
        for index in indices:
            with naming(f"sample {index}"):
                samples.append(transform(self._samples[index]))
        return FetchedBatch(samples) if self._unfinished else samples
