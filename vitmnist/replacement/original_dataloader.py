"""Checks whether a `DataLoader` can be replaced, rebuilds it, reads its samples, and compares its batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

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

from vitmnist.data.random_samples import has_set_epoch
from vitmnist.errors import ConfigError, DataError, as_data_error
from vitmnist.runtime.random_state import RandomState, seed_generators
from vitmnist.store.read_in_chunks import count_reading_workers, read_in_chunks
from vitmnist.store.tree import find_difference

COMPARED_BATCHES = 3
"""The number of batches of a replacement that are compared with the original's."""
COMPARED_SIZE = 16
"""The largest number of samples in a compared batch. Comparing decodes each sample again."""
COMPARED_SINGLE_SAMPLES = 32
"""The number of samples that are also compared as batches of a single sample."""
UPFRONT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""The samplers that draw all indices of an epoch when the first index is requested."""

Chunk = TypeVar("Chunk")


def check_replaceable(dataloader: object) -> None:
    """Raise `ConfigError` unless the object is a `DataLoader` over a map-style dataset that can be replaced."""
    kind = type(dataloader).__name__
    if not isinstance(dataloader, DataLoader):
        reason = f"must be a torch.utils.data.DataLoader, found {kind}; give the DataLoader that it wraps"
    elif type(dataloader).__iter__ is not DataLoader.__iter__:
        reason = f"{kind} iterates in its own way; give a plain DataLoader, such as the one that a framework wraps"
    elif isinstance(dataloader.dataset, IterableDataset):
        reason = "its dataset is an IterableDataset, whose samples have no index; use the DataLoader as it is"
    elif has_set_epoch(dataloader.dataset):
        reason = "its dataset has set_epoch, so its samples change; use the DataLoader as it is"
    elif dataloader.batch_sampler is None:
        reason = "batch_size=None: its dataset makes whole batches, which cannot be divided into samples"
    else:
        return
    raise ConfigError(f"dataloader: {reason}")


def rebuild(dataloader: DataLoader[Any], cls: type[DataLoader[Any]] = DataLoader, /, **changed: Any) -> DataLoader[Any]:
    """Build a `DataLoader` of the class `cls` with the arguments of `dataloader`, except for those in `changed`."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order"]
    if changed.get("num_workers", dataloader.num_workers):
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    # Leave out a batch sampler that the DataLoader has created: frameworks wrap the sampler in a batch sampler again.
    if dataloader.batch_size is None and dataloader.batch_sampler is not None and "batch_size" not in changed:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "drop_last"]
        names += [] if isinstance(dataloader.dataset, IterableDataset) else ["sampler"]
    return cls(**{name: getattr(dataloader, name) for name in names} | changed)


def order_depends_on_workers(dataloader: DataLoader[Any]) -> bool:
    """Whether the workers affect the order of samples, because they read ahead."""
    if not dataloader.num_workers:
        return False
    sampler = dataloader.sampler
    draws_upfront = dataloader.batch_size is not None and type(sampler) in UPFRONT_SAMPLERS
    # A RandomSampler with its own generator draws again at the end of an epoch.
    draws_again = isinstance(sampler, RandomSampler) and sampler.generator is not None
    # Persistent workers are seeded once. A DataLoader without workers draws a seed in each epoch.
    return not draws_upfront or draws_again or dataloader.persistent_workers


def fetch_sample(read: Callable[[int], Any], index: int) -> Any:
    """Call `read` with an index. An error becomes a `DataError` that names the sample."""
    with as_data_error(f"sample {index}"):
        return read(index)


def collate_batch(collate: Callable[[list[Any]], object], samples: list[Any], indices: Sequence[int]) -> object:
    """Collate samples. An error becomes a `DataError` that names their indices."""
    with as_data_error(f"the collate function, for samples {', '.join(map(str, indices[:3]))}, …"):
        return collate(samples)


def fetch_samples(dataset: Any, indices: Sequence[int]) -> Any:
    """Read the samples of a batch as a `DataLoader` does."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [fetch_sample(dataset.__getitem__, index) for index in indices]


def read_all(dataloader: DataLoader[Any], read: Callable[[range], Chunk], sample_nbytes: float) -> Iterator[Chunk]:
    """Yield `read(indices)` for ranges that cover all samples, in worker processes if possible."""
    dataset: Any = dataloader.dataset
    workers = count_reading_workers(dataset, dataloader.num_workers)
    context, worker_init_fn = dataloader.multiprocessing_context, dataloader.worker_init_fn
    return read_in_chunks(dataset, read, sample_nbytes, workers, context, worker_init_fn)


def check_same_batches(original: DataLoader[Any], replacement: DataLoader[Any], single_samples: bool = False) -> None:
    """Compare some batches bit for bit. Raises `DataError` if they differ."""
    size = min(original.batch_size or COMPARED_SIZE, COMPARED_SIZE)
    shuffled = torch.randperm(len(original.dataset), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    batches = shuffled.split(size)[:COMPARED_BATCHES]
    compared = [indices for indices in batches if len(indices) == size or not original.drop_last]
    if single_samples:  # They reveal padding to the longest sample, even if other batches need none.
        compared += shuffled[:COMPARED_SINGLE_SAMPLES].split(1)
    state = RandomState(original.dataset, original.collate_fn, replacement.dataset, replacement.collate_fn)
    # Compare a batch again with other random numbers, as in a second epoch: it differs if a transform changes data of
    # the original dataset in place.
    for batch_index, indices in enumerate(rows.tolist() for rows in [*compared, *compared[:1]]):
        batches = []
        for dataloader in (replacement, original):
            seed_generators(0, batch_index, 0)
            samples = fetch_samples(dataloader.dataset, indices)
            batches.append(collate_batch(dataloader.collate_fn, samples, indices))
            state.restore()
        if difference := find_difference(*batches):
            names = ", ".join(map(str, indices[:3]))
            raise DataError(
                f"{difference} of samples {names}, … differs from the DataLoader's: fingerprint= does not fit, or "
                "samples depend on what was read before, or a transform changes data of the dataset in place, or "
                "samples draw from a generator that cannot be detected (such as default_rng() in each call); keep no "
                "state between samples, clone data before changing it, move the random step into the attribute "
                "transform of the dataset, or use the DataLoader as it is (if data were changed in place, build its "
                "dataset again)"
            )
