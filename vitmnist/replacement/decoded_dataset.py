"""A dataset whose samples have been decoded once, and the `DataLoader` over it.

Torch passes the result of a dataset's `__getitems__` unchanged to the collate function. A decoded dataset can therefore
return a `DeferredBatch`, a call that makes the whole batch. Its collate function runs the call.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.errors import ConfigError
from vitmnist.replacement.split_transforms import Transform, TransformGuard
from vitmnist.store.read_in_chunks import MapStyleDataset, WrappedDataset, refuse_attribute


class DecodedDataset(WrappedDataset):
    """A dataset whose samples have been decoded once.

    Attributes, such as `classes`, are read from the original dataset. Setting one is an error, because it would not
    change the decoded samples. Subclasses set their attributes before they call `super().__init__`.

    Args:
        original: the dataset that decodes the samples.
        deterministic: the transforms that have been applied to the samples.
    """

    draws_early = False
    """Whether `iter` draws the order of an epoch, like the original's workers, which read ahead."""

    def __init__(self, original: MapStyleDataset, deterministic: Iterable[Transform]) -> None:
        self.transform_guard = TransformGuard(original, deterministic)
        self.original = original  # From here on, `__setattr__` refuses to set an attribute.

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> object:
        """Read a sample from the original. A `DataLoader` over this dataset does not call this method."""
        return self.original[index]

    def __setattr__(self, name: str, value: object) -> None:
        if "original" in vars(self):
            raise refuse_attribute(name)
        super().__setattr__(name, value)


class DeferredBatch(partial[object]):
    """A call that makes a batch. A decoded dataset returns it from `__getitems__` instead of samples."""

    def __getitem__(self, index: int) -> object:
        raise ConfigError(
            "a DataLoader over a DecodedDataset needs collate_fn=loader.collate_fn, of the loader that from_dataloader "
            "returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False)"
        )


def materialize_or_collate(collate: Callable[[list[Any]], object], batch: DeferredBatch | list[Any]) -> object:
    """Make a `DeferredBatch`, or collate samples, which a `ConcatDataset` of decoded datasets delivers."""
    return batch() if isinstance(batch, DeferredBatch) else collate(batch)


class DecodedDataLoader(DataLoader[Any]):
    """A `DataLoader` over a `DecodedDataset`. `iter` raises `ConfigError` if a transform has changed."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A framework can build this class over another dataset, such as a Subset.
        if not isinstance(self.dataset, DecodedDataset):
            return super().__iter__()
        self.dataset.transform_guard.check()
        batches = super().__iter__()
        return chain([*islice(batches, 1)], batches) if self.dataset.draws_early else batches
