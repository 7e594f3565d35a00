"""A `DataLoader` over samples that are decoded once, with the batches of the `DataLoader` that it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from tqdm import tqdm

from vitmnist.data.batch_tensors import BatchTensors, find_difference
from vitmnist.data.decoded_cache import decode_once, decode_temporarily
from vitmnist.data.decoding import CHUNK, PROBES, find_random, load_chunks
from vitmnist.data.frozen_state import FrozenState, preserved_own_generators
from vitmnist.data.loaders.cache import CacheOptions
from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import ConfigError, DataError, UserError, allowed_names, first_line
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits

STORES = ("gpu_slice", "ram", "cache")
DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw the indices of an epoch when the first is asked for."""
COMPARED = 3  # batches that are compared with the original before the replacement is returned


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    device: torch.device | str | None = None,
    folder: str = CacheOptions.folder,
    fingerprint: str | None = None,
    num_workers: int | None = None,
) -> DataLoader[Any]:
    """A `DataLoader` with the same batches, in the same order, over samples that are decoded once.

    It is built from the arguments of the original: its sampler or batch sampler, generator, workers. So everything
    that takes a `DataLoader` takes it, and Accelerate or Lightning give each rank its part. Its `dataset` is a
    `DecodedDataset`. If `dataloader` is such a replacement already, it is returned.

    Args:
        loader: where the samples are kept. ram: in memory; cache: in a memory-mapped file; gpu_slice: on the device.
            auto: the first that fits of gpu_slice (if `device` is a CUDA device), ram and cache. If the samples cannot
            be kept, auto warns with the reason, and returns the DataLoader that it was given.
        device: of gpu_slice, which delivers the batches there; by default the current CUDA device. ram and cache
            deliver on the host, as the original does.
        folder: of the files of cache.
        fingerprint: names the decoded contents, so that later processes find them in `folder`; by default that of a
            Hugging Face dataset with torch's own collate function. Without one, the file is for this process only.
        num_workers: of the result. None: 0, because gathering a batch takes less time than receiving one; or those of
            the original, where its order depends on them: persistent workers, a sampler or generator of your own.
            Loaders that are iterated in lockstep (`zip`) draw their seeds in another order with 0 than with workers.

    Raises:
        ConfigError: a loader that is unknown or cannot be used; random samples, which decoding once would freeze.
        DataError: samples that cannot be kept as rows of tensors, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    if loader not in (*STORES, "auto"):
        raise ConfigError(f"loader={loader}: {allowed_names(loader, (*STORES, 'auto'))}")
    if device is not None and loader in ("ram", "cache"):
        raise ConfigError(f"device={device}: {loader} delivers batches on the host; leave device out, or use gpu_slice")
    try:
        check_replaceable(dataloader)
    except UserError as error:
        if loader != "auto" or not isinstance(dataloader, DataLoader):
            raise
        return _unchanged(dataloader, error)
    if isinstance(dataloader.dataset, DecodedDataset):
        return dataloader
    target = choose_device("auto" if device is None else str(device))
    workers = workers_needed(dataloader) if num_workers is None else num_workers
    with_gpu = device is not None and target.type == "cuda"
    for name in (STORES if with_gpu else STORES[1:]) if loader == "auto" else (loader,):
        try:
            batches, state = _decode(dataloader, name, target, Path(folder).expanduser(), fingerprint, workers)
        except UserError as error:
            if loader != "auto":
                raise
            reason = error
            if not isinstance(error, DoesNotFitError) and name != "gpu_slice":  # true of the others too
                break
        else:
            return rebuilt(
                dataloader,
                dataset=DecodedDataset(dataloader.dataset, batches, state),
                collate_fn=partial(_hand_on, dataloader.collate_fn),
                num_workers=workers,
                pin_memory=dataloader.pin_memory and name != "gpu_slice",
            )
    return _unchanged(dataloader, reason)


def _unchanged(dataloader: DataLoader[Any], reason: UserError) -> DataLoader[Any]:
    """Warn with the reason, and return the DataLoader as it is."""
    warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {reason}", stacklevel=3)
    return dataloader


class DecodedDataset(Dataset[Any]):
    """The samples of another dataset, decoded once; `DataLoader` gathers a batch of them at once.

    Attributes other than `original` and `sample_nbytes` are those of the original dataset, such as `classes`. Setting
    one of them, or changing one in the original, is an error at the next batch: the decoded samples do not follow it.

    Args:
        dataset: the original.
        batches: the decoded samples, as one batch of the collate function.
        state: of the original when it was decoded.
    """

    original: Dataset[Any]
    _batches: BatchTensors
    _state: FrozenState

    def __init__(self, dataset: Dataset[Any], batches: BatchTensors, state: FrozenState) -> None:
        self.__dict__.update(original=dataset, _batches=batches, _state=state)

    def __len__(self) -> int:
        return len(next(iter(self._batches.tensors.values())))

    def __getitem__(self, index: int) -> Any:
        """A sample of the original; batches do not need it."""
        return self.original[index]

    def __getitems__(self, indices: Sequence[int]) -> GatheredBatch:
        """The batch of these samples, for the collate function of the replacement."""
        self._state.check()
        return GatheredBatch(self._batches.gather(indices))

    @property
    def sample_nbytes(self) -> int:
        """Bytes that a decoded sample takes."""
        return self._batches.sample_nbytes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


class GatheredBatch:
    """A batch that is collated already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(
            "a DecodedDataset gives collated batches: a DataLoader over it needs collate_fn=loader.collate_fn, of the "
            "loader that from_dataloader returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and "
            "remove_unused_columns=False); .original of it is the dataset that gives samples"
        )


def _hand_on(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Collate single samples, such as those of a `ConcatDataset`; hand on what is collated already."""
    return samples.batch if isinstance(samples, GatheredBatch) else collate(samples)


def rebuilt(dataloader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A `DataLoader` with the arguments of another one, of which some are changed."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order"]
    if changed.get("num_workers", dataloader.num_workers):
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    # Not the batch sampler that the DataLoader has made: frameworks build another one around the sampler.
    is_own = dataloader.batch_size is None and "batch_size" not in changed
    names += ["batch_sampler"] if is_own else ["batch_size", "drop_last", "sampler"]
    return DataLoader(**{name: getattr(dataloader, name) for name in names} | changed)


def check_replaceable(dataloader: Any) -> None:
    """Raise `ConfigError` or `DataError` if this DataLoader has no batches of samples with an index."""
    kind = type(dataloader).__name__
    if not isinstance(dataloader, DataLoader):
        if isinstance(getattr(dataloader, "loader", None), DataLoader):  # as timm's PrefetchLoader has
            raise ConfigError(f"dataloader: {kind} wraps a DataLoader; give its .loader")
        raise ConfigError(f"dataloader: must be a torch.utils.data.DataLoader, found {kind}")
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"dataloader: {kind} iterates in its own way; give the DataLoader that it was made of, before a framework "
            "prepares it"
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigError(
            "dataloader: its dataset is an IterableDataset, whose samples have no index to find them by again; use the "
            "DataLoader as it is"
        )
    if dataloader.batch_sampler is None:
        raise ConfigError("dataloader: batch_size=None leaves batches to the dataset; give it a batch_size")
    if not len(dataloader.dataset):  # type: ignore[arg-type]
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


def _decode(
    dataloader: DataLoader[Any], name: str, device: torch.device, folder: Path, fingerprint: str | None, workers: int
) -> tuple[BatchTensors, FrozenState]:
    """All samples where they are kept, and the dataset's state; raises as `from_dataloader`."""
    dataset: Any = dataloader.dataset
    if name == "gpu_slice" and workers:
        raise ConfigError(
            f"gpu_slice: num_workers={workers}, and workers cannot deliver from the device; give from_dataloader "
            "num_workers=0, which keeps the order unless it depends on how far workers read ahead"
        )
    if hasattr(dataset, "set_epoch"):
        raise ConfigError(f"{name}: the dataset has set_epoch: its samples change; use the DataLoader as it is")
    size, state = len(dataset), FrozenState(dataset, dataloader.collate_fn)
    try:
        with preserved_generators(), preserved_own_generators(dataset):
            first = BatchTensors.of(_read(dataloader, range(min(size, 2))), min(size, 2))
            if random := find_random(dataset, dataloader.collate_fn):
                raise ConfigError(
                    f"{name}: {random} is random: it differs when it is read twice, and {name} would repeat one "
                    "version of it; move the random transform to the batches, in the training loop"
                )
            chunks = partial(_chunks, dataloader, first)
            files = [str(number) for number in range(len(first.tensors))]
            if default_collate is dataloader.collate_fn:
                fingerprint = fingerprint or getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset
            if name == "cache" and fingerprint:
                contents = f"{fingerprint}, {size} samples, {first.forms}"
                tensors = decode_once(folder, contents, size, chunks, names=files).mapped
            elif name == "cache":
                tensors = decode_temporarily(folder, size, chunks, files)
            else:
                needed = first.sample_nbytes * size
                check_fits(name, Memory(needed, needed if (name, device.type) == ("gpu_slice", "cuda") else 0), device)
                tensors = load_chunks(chunks(), size)
            if name == "gpu_slice":
                tensors = tuple(tensor.to(device) for tensor in tensors)
            batches = replace(first, tensors=dict(zip(first.tensors, tensors, strict=True)))
            _check_batches(dataloader, batches, size)
    except ConfigError:
        raise
    except Exception as error:  # samples and collate function may fail in any way
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {first_line(error)}"
        if not isinstance(error, DataError):
            reason += "; raised by the dataset or the collate function, for samples read one after another"
        raise DataError(f"{name}: {reason}") from error
    state.ignore_changes()
    return batches, state


def _check_batches(dataloader: DataLoader[Any], batches: BatchTensors, size: int) -> None:
    """Raise `DataError` if a batch of the decoded samples is not what the collate function makes of them."""
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    # Batches of one too: where a batch is padded to its longest sample, all large ones may be equally long.
    for part in (*shuffled.split(dataloader.batch_size or CHUNK)[:COMPARED], *shuffled[:PROBES].split(1)):
        indices = part.tolist()
        if difference := find_difference(batches.gather(indices), _read(dataloader, indices)):
            raise DataError(
                f"{difference} of samples {', '.join(map(str, indices[:3]))}, … is not what the DataLoader makes of "
                "them: it depends on the other samples of the batch (pad to a fixed length), it is random at times "
                "(use the DataLoader as it is), or fingerprint= names other contents (give another one)"
            )


def _read(dataloader: DataLoader[Any], indices: Sequence[int]) -> Any:
    """The batch that a `DataLoader` makes of these samples."""
    dataset: Any = dataloader.dataset
    if hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(list(indices))
    else:
        samples = [dataset[index] for index in indices]
    return dataloader.collate_fn(samples)


def _chunks(dataloader: DataLoader[Any], first: BatchTensors) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of all samples in their order, in chunks; with the workers of the `DataLoader`."""
    chunks = rebuilt(
        dataloader, batch_size=CHUNK, sampler=None, drop_last=False, generator=torch.Generator(), pin_memory=False
    )
    chunks.is_internal = True  # `vitmnist diagnose` observes the user's alone
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    for number, batch in enumerate(tqdm(chunks, desc="decoding once", leave=False, disable=None)):
        chunk = BatchTensors.of(batch, min(CHUNK, size - number * CHUNK))
        first.check_same(chunk)
        yield tuple(chunk.tensors.values())
