"""A dataset whose samples have been decoded once, the `DataLoader` over it, and the check for later changes.

Subclasses override `__getitem__`, which returns a sample, or `__getitems__`. Torch passes the result of `__getitems__`
unchanged to the collate function, so it can be a `DeferredBatch`, a call that makes the whole batch.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any

from torch.utils.data import DataLoader, Dataset

from vitmnist.errors import ConfigError
from vitmnist.replacement.original_dataloader import rebuild
from vitmnist.replacement.split_transforms import SplitTransforms, get_transform_name, list_transforms
from vitmnist.runtime.generator_search import find_plain_attributes, find_reachable
from vitmnist.store.read_in_chunks import MapStyleDataset, WrappedDataset, refuse_attribute


class DecodedDataset(WrappedDataset):
    """A dataset whose samples have been decoded once.

    Attributes, such as `classes`, are read from the original dataset, so the names of our attributes must not occur in
    other datasets (some have `samples`, `data` or `split`). Setting an attribute is an error, because it would not
    change the decoded samples.
    """

    split_transforms: SplitTransforms | None  # The random transforms run in each epoch. None: no sample is random.
    draws_early = False
    """Draw the order of an epoch in `iter`, like the original's workers, which read ahead. The order is then
    independent of random numbers that the loop draws before the first batch, for example for another loader in a `zip`.
    """

    def __init__(self, original: MapStyleDataset, stages: SplitTransforms | None = None, **attributes: object) -> None:
        once = chain.from_iterable(stages.deterministic) if stages else list_transforms(original)
        vars(self).update(original=original, split_transforms=stages, change_guard=ChangeGuard(original, once))
        vars(self).update(attributes)  # Those that a subclass declares. `__setattr__` refuses to set them.

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> object:
        """Read a sample from the original. A `DataLoader` over this dataset does not call this method."""
        return self.original[index]

    def __setattr__(self, name: str, value: object) -> None:
        raise refuse_attribute(name)


class DeferredBatch(partial[object]):
    """A call that makes a batch. A decoded dataset returns it from `__getitems__` instead of samples."""

    def __getitem__(self, index: int) -> object:
        raise ConfigError(
            "a DataLoader over a DecodedDataset needs collate_fn=loader.collate_fn, of the loader that from_dataloader "
            "returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False)"
        )


def materialize_or_collate(collate: Callable[[list[Any]], object], batch: DeferredBatch | list[Any]) -> object:
    """Make a `DeferredBatch`, or collate the samples that `__getitem__` returned."""
    return batch() if isinstance(batch, DeferredBatch) else collate(batch)


class DecodedDataLoader(DataLoader[Any]):
    """A `DataLoader` over a `DecodedDataset`. `iter` raises `ConfigError` if a transform has changed."""

    @classmethod
    def from_original(cls, original: DataLoader[Any], dataset: DecodedDataset, num_workers: int) -> DataLoader[Any]:
        """Build a loader with the other arguments of the original."""
        collate = partial(materialize_or_collate, original.collate_fn)
        return rebuild(original, cls, dataset=dataset, num_workers=num_workers, collate_fn=collate)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A framework can build this class over another dataset, such as a Subset.
        if not isinstance(self.dataset, DecodedDataset):
            return super().__iter__()
        self.dataset.change_guard.check()
        batches = super().__iter__()
        return chain([*islice(batches, 1)], batches) if self.dataset.draws_early else batches


class ChangeGuard:
    """Detects that a transform was replaced, or that a deterministic transform or the dataset has changed.

    It compares the `repr` of deterministic transforms, and the attributes that are numbers, flags or strings.
    """

    def __init__(self, dataset: object, deterministic: Iterable[object]) -> None:
        self._dataset, self._transforms = dataset, list_transforms(dataset)
        once = [*deterministic]
        self._watched: list[tuple[object, str, Callable[[], object], object]]
        self._watched = [(part, get_transform_name(part), partial(repr, part), repr(part)) for part in once]
        for part in (*once, *(part for part in find_reachable([dataset]) if isinstance(part, Dataset))):
            self._watched += [(part, name, read, read()) for name, (read, _) in find_plain_attributes(part)]

    def __getstate__(self) -> dict[str, Any]:
        # The `repr` of a copy can differ, because by default it contains the address.
        return vars(self) | {"_watched": []}

    def allow_changes_by_reading(self, collate: object) -> None:
        """Call this after samples and batches have been read: watch no attribute that this has changed.

        Attributes that `collate`, or the transforms of later epochs, can reach are not watched either.
        """
        once = [part for part, *_ in self._watched]
        live = [transform for transform in self._transforms if not any(transform is part for part in once)]
        used = {id(part) for part in find_reachable([collate, *live])}
        self._watched = [item for item in self._watched if id(item[0]) not in used and item[2]() == item[3]]

    def check(self) -> None:
        """Raise `ConfigError` if a transform or the dataset has changed."""
        pairs = zip_longest(list_transforms(self._dataset), self._transforms)
        changed = [get_transform_name(now or before) for now, before in pairs if now is not before]
        changed += [name for _, name, read, value in self._watched if read() != value]
        if changed:
            raise ConfigError(
                f"{changed[0]} has changed since the samples were decoded; set it before from_dataloader, or use the "
                "DataLoader as it is"
            )
