"""A user's `DataLoader`: whether it can be replaced, and how one with the same settings is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    DecodedDataLoader,
    collated,
    read_batch,
)
from vitmnist.replacement.split_transforms import named_sample
from vitmnist.store.tree import copied, find_difference

COMPARED = 3  # So many batches are compared with the original before a replacement is returned.
COMPARED_SIZE = 16  # Larger batches are compared in part, because each of their samples is decoded again.
COMPARED_ALONE = 32  # So many samples are compared as batches of one.
# These samplers draw the indices of an epoch when the first is asked for.
DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


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
    # The batch sampler that the DataLoader has made is left out: frameworks build another one around the sampler.
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
        reason = f"must be a torch.utils.data.DataLoader, found {kind}; give the DataLoader that it wraps"
    elif type(dataloader).__iter__ is not DataLoader.__iter__:
        reason = f"{kind} iterates in its own way; give a plain DataLoader, such as the one that a framework wraps"
    elif isinstance(dataloader.dataset, IterableDataset):
        reason = "its dataset is an IterableDataset, whose samples have no index; use the DataLoader as it is"
    elif hasattr(dataloader.dataset, "set_epoch"):
        reason = "its dataset has set_epoch, so its samples change; use the DataLoader as it is"
    elif dataloader.batch_sampler is None:
        reason = "batch_size=None: its dataset makes whole batches, which cannot be divided into samples"
    elif not len(dataloader.dataset):  # type: ignore[arg-type]
        reason = "its dataset is empty"
    else:
        return
    raise ConfigError(f"dataloader: {reason}")


def workers_needed(dataloader: DataLoader[Any]) -> int:
    """How many workers keep the order of samples: none, if reading batches ahead draws no further random number."""
    sampler, workers = dataloader.sampler, int(dataloader.num_workers)
    if dataloader.batch_size is None or type(sampler) not in DRAW_AT_ONCE:
        return workers
    if isinstance(sampler, RandomSampler) and sampler.generator is not None:
        return workers  # The sampler draws again at the end of an epoch.
    # Persistent workers get their seed once, and a DataLoader without workers draws one in each epoch.
    return workers if dataloader.persistent_workers else 0


def find_random(
    dataloader: DataLoader[Any], probes: Sequence[int], batch_size: int
) -> tuple[list[Any], object, str | None]:
    """The samples of these indices, a batch of the first of them, and what is random; None if nothing is.

    Raises:
        DataError: a sample that cannot be read, or a collate function that fails for them.
    """
    dataset: Any = dataloader.dataset
    try:
        samples = read_probes(partial(named_sample, dataset.__getitem__), probes, dataset)
    except RandomSampleError as error:
        return [], None, str(error)
    collate = partial(collated, dataloader.collate_fn, indices=probes)
    batch, reason = call_watched(lambda: collate(copied(samples[:batch_size])), (dataset, collate), again=True)
    return samples, batch, reason and f"the collate function is random ({reason})"


def check_same_batches(original: DataLoader[Any], replaced: DataLoader[Any], with_single: bool = False) -> None:
    """Compare some batches, bit for bit; raise `DataError` if they differ.

    Args:
        with_single: compare batches of one sample too. Where batches are padded to their longest sample, all larger
            ones may be equally long.
    """
    shuffled = torch.randperm(len(original.dataset), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    size = min(original.batch_size or COMPARED_SIZE, COMPARED_SIZE)
    parts = [part for part in shuffled.split(size)[:COMPARED] if len(part) == size or not original.drop_last]
    if with_single:
        parts += shuffled[:COMPARED_ALONE].split(1)
    for indices in (part.tolist() for part in parts):
        batches = []
        for dataloader in (replaced, original):
            with preserved_random_state(dataloader.dataset, dataloader.collate_fn):
                seed_generators(0, 0, 0)
                batches.append(read_batch(dataloader.dataset, dataloader.collate_fn, indices))
        if difference := find_difference(*batches):
            samples = ", ".join(map(str, indices[:3]))
            raise DataError(
                f"{difference} of samples {samples}, … is not what the DataLoader makes of them: fingerprint= does not "
                "fit, or samples depend on what was read before, or are random without a generator that can be seen "
                "(such as default_rng() in each call); keep no state between samples, move the random step into the "
                "attribute transform of the dataset, or use the DataLoader as it is"
            )
