"""Datasets of samples that were decoded once, and the `DataLoader` over them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.errors import ConfigError
from vitmnist.replacement.decoding import BatchRows
from vitmnist.replacement.original import fetch_sample
from vitmnist.replacement.transform_guard import TransformGuard
from vitmnist.store.read_once import MapStyleDataset, WrappedDataset
from vitmnist.store.samples import Samples


class DecodedDataset(WrappedDataset):
    """The samples of another dataset, decoded once.

    It has the attributes of the original dataset, such as `classes`, in addition to `original` and `sample_nbytes`.
    Setting one sets it there, and does not change the decoded samples.

    Args:
        original: the dataset.
        guard: notices changes of its transforms.
        sample_nbytes: average size of a decoded sample in bytes.
    """

    def __init__(self, original: MapStyleDataset, guard: TransformGuard, sample_nbytes: float) -> None:
        vars(self).update(original=original, _guard=guard, sample_nbytes=sample_nbytes)

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> object:
        """A sample of the original; batches do not need it."""
        return self.original[index]

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["original"], name, value)


class FetchedBatch:
    """What a decoded dataset returns for the indices of a batch, in place of a list of samples.

    Args:
        make: makes the batch; the collate function of the `DataLoader` calls it.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make

    def __getitem__(self, index: int) -> object:
        raise ConfigError(
            "a DataLoader over a DecodedDataset needs collate_fn=loader.collate_fn, of the loader that from_dataloader "
            "returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False)"
        )


class Collator:
    """The collate function of a replacement, for a `FetchedBatch` or for single samples, as of a `ConcatDataset`.

    Args:
        collate: the original's collate function, for single samples.
    """

    def __init__(self, collate: Callable[[list[Any]], object]) -> None:
        self.collate = collate

    def __call__(self, samples: FetchedBatch | list[Any]) -> object:
        return samples.make() if isinstance(samples, FetchedBatch) else self.collate(samples)


class GatheredDataset(DecodedDataset):
    """Samples that are rows of tensors; `DataLoader` gets a whole batch by one gather."""

    def __init__(self, original: MapStyleDataset, guard: TransformGuard, rows: BatchRows) -> None:
        super().__init__(original, guard, rows.sample_nbytes)
        vars(self).update(_rows=rows)

    def __getitems__(self, indices: Sequence[int]) -> FetchedBatch:
        return FetchedBatch(partial(self._rows.gather, indices))


class TransformedDataset(DecodedDataset):
    """Samples that are decoded once, and transformed each time that they are read.

    Args:
        transform: makes a sample of a decoded one.
    """

    def __init__(
        self, original: MapStyleDataset, guard: TransformGuard, samples: Samples, transform: Callable[[Any], object]
    ) -> None:
        super().__init__(original, guard, samples.nbytes / len(samples))
        vars(self).update(_samples=samples, _transform=transform)

    def __getitem__(self, index: int) -> object:
        return self._transform(self._samples[index])

    def __getitems__(self, indices: Sequence[int]) -> FetchedBatch | list[object]:
        return [fetch_sample(self.__getitem__, index) for index in indices]


class DecodedDataLoader(DataLoader[Any]):
    """A `DataLoader` over decoded samples; `iter` raises `ConfigError` if a transform has changed since."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.check_transforms()
        return super().__iter__()

    def check_transforms(self) -> None:
        """Raise `ConfigError` if a transform has changed since the samples were decoded."""
        # A framework may have built this loader over another dataset, such as a Subset.
        if isinstance(self.dataset, DecodedDataset):
            self.dataset._guard.check()


class EagerDataLoader(DecodedDataLoader):
    """Draws the order of an epoch when `iter` is called, as a DataLoader with workers does, because they read ahead.

    Random numbers that the loop draws between `iter` and the first batch, such as the order of another loader in a
    `zip`, then come after it.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        return chain([*islice(batches, 1)], batches)
