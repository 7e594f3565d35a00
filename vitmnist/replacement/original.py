"""A user's `DataLoader`: whether it can be replaced, and how one with the same settings is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vitmnist.data.randomness import (
    RandomSampleError,
    call_watched,
    preserved_random_state,
    read_probes,
    seed_generators,
)
from vitmnist.errors import ConfigError, DataError
from vitmnist.replacement.decoded_dataset import (
    BatchRows,
    DecodedDataLoader,
    NoRowsError,
    collated,
    named_sample,
    read_batch,
)
from vitmnist.store.tree import copied, find_difference

COMPARED = 3
"""Number of batches that are compared with the original before a replacement is returned."""
COMPARED_SIZE = 16
"""The largest of these batches, because each of its samples is decoded again."""
DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw the indices of an epoch when the first is asked for."""


class EagerDataLoader(DecodedDataLoader):
    """Draws the order of an epoch when `iter` is called, as a DataLoader with workers does, because they read ahead.

    Random numbers that the loop draws between `iter` and the first batch, such as the order of another loader in a
    `zip`, then come after it.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        return chain([*islice(batches, 1)], batches)


def rebuilt(
    dataloader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, /, **changed: object
) -> DataLoader[Any]:
    """A `DataLoader` with the arguments of another one, some of them changed."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order"]
    if changed.get("num_workers", dataloader.num_workers):
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    # Not the batch sampler that the DataLoader has made: frameworks build another one around the sampler.
    if dataloader.batch_size is None and dataloader.batch_sampler is not None and "batch_size" not in changed:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "drop_last"]
        names += [] if isinstance(dataloader.dataset, IterableDataset) else ["sampler"]
    return kind(**{name: getattr(dataloader, name) for name in names} | changed)


def check_replaceable(dataloader: object) -> None:
    """Raise `ConfigError` or `DataError` unless this is a `DataLoader` of batches of indexed samples."""
    kind = type(dataloader).__name__
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"dataloader: must be a torch.utils.data.DataLoader, found {kind}; give the DataLoader that it wraps"
        )
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"dataloader: {kind} iterates in its own way; give a plain DataLoader, such as the one that a "
            "framework has made it of"
        )
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "dataloader: its dataset is an IterableDataset, whose samples have no index to find them by again; use the "
            "DataLoader as it is"
        )
    if hasattr(dataset, "set_epoch"):
        raise ConfigError("dataloader: its dataset has set_epoch: its samples change; use the DataLoader as it is")
    if dataloader.batch_sampler is None:
        raise ConfigError(
            "dataloader: batch_size=None: the dataset makes whole batches itself, which from_dataloader "
            "cannot divide into samples"
        )
    if not len(dataset):  # type: ignore[arg-type]
        raise DataError("dataloader: its dataset is empty")


def workers_needed(dataloader: DataLoader[Any]) -> int:
    """How many workers keep the order of samples: none, if reading batches ahead draws no further random number."""
    sampler, workers = dataloader.sampler, int(dataloader.num_workers)
    if dataloader.batch_size is None or type(sampler) not in DRAW_AT_ONCE:
        return workers
    if isinstance(sampler, RandomSampler) and sampler.generator is not None:  # draws again at the end of an epoch
        return workers
    # Persistent workers get their seed once, and a DataLoader without workers draws one in each epoch.
    return workers if dataloader.persistent_workers else 0


def find_random(dataloader: DataLoader[Any], probes: Sequence[int]) -> tuple[list[Any], str | None]:
    """The samples of these indices, and what is random, a sample or the collate function; None if nothing is.

    Raises:
        DataError: a sample that cannot be read, or a collate function that fails for them.
    """
    dataset: Any = dataloader.dataset
    try:
        samples = read_probes(partial(named_sample, dataset), probes, dataset)
    except RandomSampleError as error:
        return [], str(error)
    size = min(dataloader.batch_size or COMPARED_SIZE, len(samples))
    collate = partial(collated, dataloader.collate_fn, f"samples {', '.join(map(str, probes[:3]))}, …")
    _, reason = call_watched(lambda: collate(copied(samples[:size])), (dataset, collate), again=True)
    return samples, reason and f"the collate function is random ({reason})"


def check_rows(collate: Callable[[list[Any]], Any], samples: list[Any]) -> BatchRows:
    """The batch of some samples; raises `NoRowsError` unless its rows are those of batches of one sample."""
    rows = BatchRows.of(collate(copied(samples)), len(samples))
    for position, sample in enumerate(samples):
        row = BatchRows.of(collate(copied([sample])), 1)
        rows.check_same(row)
        if difference := find_difference(rows.gather([position]), row.gather([0])):
            raise NoRowsError(f"{difference} depends on the other samples of the batch")
    return rows


def seeded_batch(dataset: Any, collate: Callable[[list[Any]], object], indices: Sequence[int]) -> object:
    """The batch of these samples of a dataset, with the same random numbers in each call."""
    with preserved_random_state(dataset, collate):
        seed_generators(0, 0, 0)
        return read_batch(dataset, collate, indices)


def check_same_batches(original: DataLoader[Any], replaced: DataLoader[Any], *, is_random: bool, options: str) -> None:
    """Compare some batches, bit for bit; raise `DataError` if they differ, by what they depend on.

    Args:
        options: those that the user has given and that may not fit.

    Raises:
        NoRowsError: they depend on the other samples of a batch.
    """
    shuffled = torch.randperm(len(original.dataset), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    size = min(original.batch_size or COMPARED_SIZE, COMPARED_SIZE)
    parts = [part for part in shuffled.split(size)[:COMPARED] if len(part) == size or not original.drop_last]
    if not is_random:  # of one too: where batches are padded to the longest sample, all large ones may be equally long
        parts += shuffled[:COMPARED_SIZE].split(1)
    for indices in (part.tolist() for part in parts):
        expected = seeded_batch(original.dataset, original.collate_fn, indices)
        if not (difference := find_difference(seeded_batch(replaced.dataset, replaced.collate_fn, indices), expected)):
            continue
        if not (is_random or options):
            raise NoRowsError(f"{difference} depends on the other samples of the batch")
        reason = (
            "they are random without a generator that can be seen (such as default_rng() in each call), or depend on "
            "what was read before; keep no state between samples, name the random step with decode= and transform=, or "
            "use the DataLoader as it is"
        )
        if options:
            reason = f"{options} do not fit"
        named = ", ".join(map(str, indices[:3]))
        raise DataError(f"{difference} of samples {named}, … is not what the DataLoader makes of them: {reason}")
