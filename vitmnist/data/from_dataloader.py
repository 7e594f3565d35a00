"""A replacement for a torch `DataLoader`: the same batches, from samples that are decoded once."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from tqdm import tqdm

from vitmnist.config.schema import Shuffle
from vitmnist.data.batch_layout import BatchLayout, find_difference
from vitmnist.data.collate import map_tensors
from vitmnist.data.decoded_cache import decode_once, decode_temporarily
from vitmnist.data.decoding import CHUNK, find_random, load_chunks
from vitmnist.data.loaders.base import LOADERS, Loader
from vitmnist.data.loaders.cache import CacheOptions
from vitmnist.data.loaders.pinned import HostLoader
from vitmnist.data.loaders.prefetch import PrefetchOptions, Producer
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, DataError, UserError, choices
from vitmnist.runtime.device import accelerator_of, choose_device
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits

log = logging.getLogger(__name__)

KEEPS_SAMPLES = ("gpu_slice", "ram", "cache")
COMPARED = 3  # batches that are compared with the original before the replacement is returned


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    device: torch.device | str = "auto",
    folder: str = CacheOptions.folder,
    fingerprint: str | None = None,
) -> ReplacedDataLoader:
    """A drop-in replacement for a `DataLoader` over a map-style data set: `for batch in replacement`.

    The indices are drawn by the DataLoader's own batch sampler, so that the order is the same for the same state of the
    random generators, and `DistributedSampler.set_epoch` works. A batch is what the DataLoader's collate function makes
    of the samples, in the same structure, on `device`.

    Args:
        loader: gpu_slice, ram and cache decode each sample once, with the workers of the DataLoader, and keep it on the
            device, in memory, or in a memory-mapped file. prefetch decodes as before, but in a background thread. auto
            takes the first that fits: gpu_slice (with a GPU), ram, cache; or prefetch if the samples cannot be kept.
        device: where the batches are delivered; auto is the first CUDA device, or the CPU.
        folder: of the files of cache.
        fingerprint: names the decoded contents, so that later processes find them in `folder`; by default that of a
            Hugging Face data set with torch's own collate function. Without one, the file is for this process only.

    Raises:
        ConfigError: a loader that is unknown or cannot be used; random samples, which decoding once would freeze.
        DataError: samples that cannot be kept as rows of tensors, or batches that would differ from the original's.
        DoesNotFitError: memory is too small.
    """
    allowed = (*KEEPS_SAMPLES, "prefetch", "auto")
    if loader not in allowed:
        raise ConfigError(f"loader={loader}: {choices(loader, allowed)}")
    _check_map_style(dataloader)
    place = choose_device(str(device))
    if loader == "prefetch":
        return PrefetchedDataLoader(dataloader, place)
    if loader != "auto":
        return KeptDataLoader(dataloader, loader, place, folder, fingerprint)
    for name in KEEPS_SAMPLES if place.type == "cuda" else KEEPS_SAMPLES[1:]:
        try:
            replacement = KeptDataLoader(dataloader, name, place, folder, fingerprint)
        except DoesNotFitError as reason:
            log.info("loader=auto: not %s", reason)
        except UserError as reason:  # true of the others too
            log.info("loader=auto: prefetch, because %s", reason)
            break
        else:
            log.info("loader=auto: %s keeps the samples", name)
            return replacement
    return PrefetchedDataLoader(dataloader, place)


class ReplacedDataLoader(ABC):
    """Delivers the batches of a `DataLoader`; each `iter()` begins its next epoch.

    Attributes other than these are those of the DataLoader, such as `dataset` and `batch_sampler`.
    """

    buffered = 0
    """How many batches may be ready ahead of the consumer."""

    def __init__(self, dataloader: DataLoader[Any], loader: str) -> None:
        self.dataloader, self.loader = dataloader, loader

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, whose indices are drawn now."""

    @abstractmethod
    def close(self) -> None:
        """End live iterators, and release what this object owns."""

    def __len__(self) -> int:
        return len(self.dataloader)

    def __enter__(self) -> ReplacedDataLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.dataloader, name)


class KeptDataLoader(ReplacedDataLoader):
    """Gathers batches from samples that were decoded once. See `from_dataloader`."""

    def __init__(
        self, dataloader: DataLoader[Any], loader: str, device: torch.device, folder: str, fingerprint: str | None
    ) -> None:
        super().__init__(dataloader, loader)
        if (index := find_random(dataloader.dataset, dataloader.collate_fn)) is not None:
            raise ConfigError(
                f"{loader}: sample {index} is random: it differs when it is read twice, and {loader} would repeat one "
                "version of it; use loader='prefetch', or move the random transform from the samples to the batches "
                "on the device"
            )
        size = len(dataloader.dataset)  # type: ignore[arg-type]
        first = range(min(size, 2))
        try:
            self._layout = BatchLayout.of(read_batch(dataloader, first), len(first))
            decode = partial(_decode, dataloader, self._layout)
            if loader == "cache":
                tensors = _map(decode, Path(folder).expanduser(), fingerprint or _fingerprint_of(dataloader), size)
            else:
                check_fits(loader, Memory(host=self._layout.nbytes * size), device)
                tensors = load_chunks(decode(), size)
            self._check_batches(tensors)
        except DataError as error:
            raise DataError(f"{loader}: {error}; use loader='prefetch', which keeps no samples") from error
        self._sampler = DrawnBatches(dataloader)
        self._loader: Loader
        if loader == "gpu_slice":
            self._loader = LOADERS.build({"name": loader}, tensors, self._sampler, device)
        else:
            self._loader = HostLoader(tensors, self._sampler, device)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = self._loader.epoch(self._sampler.draw())
        return (self._layout.unpack(*rows) for rows in batches)

    @property
    def sample_nbytes(self) -> int:
        """Bytes that a decoded sample takes."""
        return self._layout.nbytes

    def close(self) -> None:
        self._loader.close()

    def _check_batches(self, tensors: TensorSet) -> None:
        """Raise `DataError` if a batch of the decoded samples is not what the collate function makes of them."""
        shuffled = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(0))
        for indices in shuffled.split(self.dataloader.batch_size or CHUNK)[:COMPARED]:
            found = self._layout.unpack(tensors.images[indices], tensors.labels[indices])
            if place := find_difference(found, read_batch(self.dataloader, indices.tolist())):
                raise DataError(f"{place} depends on the other samples of its batch, or on what was read before")


class PrefetchedDataLoader(ReplacedDataLoader):
    """Lets the `DataLoader` work in a background thread. See `from_dataloader`."""

    def __init__(self, dataloader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(dataloader, "prefetch")
        has_workers = dataloader.num_workers > 0
        if not has_workers and (index := find_random(dataloader.dataset, dataloader.collate_fn)) is not None:
            raise ConfigError(
                f"prefetch: sample {index} is random, and with num_workers=0 it would share its random generators with "
                "the training loop; give the DataLoader num_workers=1 or more"
            )
        self._sampler = None if has_workers else DrawnBatches(dataloader)
        in_queue = PrefetchOptions().queue_size + 1  # the thread holds one more, for which there is no room
        self.buffered = in_queue + dataloader.num_workers * (dataloader.prefetch_factor or 0)
        self._accelerator = accelerator_of(device)
        self._stream = self._accelerator.new_stream()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        # Indices are drawn here, and not in the thread, which would share the random generators with the training loop.
        batches: Iterator[Any]
        if self._sampler:
            drawn = self._sampler.batches(self._sampler.draw())
            batches = (read_batch(self.dataloader, indices.tolist()) for indices in drawn)
        else:
            batches = iter(self.dataloader)
        to_device = partial(map_tensors, self._accelerator.to_device)
        queue_size = PrefetchOptions().queue_size
        producer = Producer(lambda: map(to_device, batches), queue_size, None, self._accelerator, self._stream)
        self._producers.add(producer)
        return producer.run()

    def close(self) -> None:
        for producer in list(self._producers):
            producer.stop()


class DrawnBatches:
    """The batches of indices of a DataLoader's own batch sampler, in place of an `EpochSampler`."""

    shuffle = Shuffle.batch  # their sizes may differ, so loaders take them one by one

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.size = len(dataloader.dataset)  # type: ignore[arg-type]
        self.batch_size = dataloader.batch_size or 1
        self.seed = 0
        # Iterating it draws from the random generators as iterating the original does.
        self._indices: DataLoader[Any] = DataLoader(
            range(self.size),  # type: ignore[arg-type]
            batch_sampler=dataloader.batch_sampler,
            collate_fn=torch.tensor,
            generator=dataloader.generator,
        )
        self._epochs: dict[int, list[Tensor]] = {}
        self._next = count()

    def __len__(self) -> int:
        return len(self._indices)

    def draw(self) -> int:
        """Draw the indices of the next epoch; returns its number."""
        number = next(self._next)
        self._epochs[number] = list(self._indices)
        return number

    def batches(self, number: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """The indices of each batch of an epoch that was drawn: int64 `[B]`."""
        drawn = self._epochs.pop(number)[start:]
        sizes = [len(indices) for indices in drawn]
        yield from torch.cat([torch.arange(0), *drawn]).to(device).split(sizes)


def read_batch(dataloader: DataLoader[Any], indices: Sequence[int]) -> Any:
    """The batch that a `DataLoader` makes of these samples; leaves the global random generators alone."""
    dataset: Any = dataloader.dataset
    with preserved_generators():
        if hasattr(dataset, "__getitems__"):
            samples = dataset.__getitems__(list(indices))
        else:
            samples = [dataset[index] for index in indices]
        return dataloader.collate_fn(samples)


def _decode(dataloader: DataLoader[Any], layout: BatchLayout) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in their order, as rows of two tensors; with the workers of the `DataLoader`."""
    chunks = DataLoader(
        dataloader.dataset,
        CHUNK,
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
        timeout=dataloader.timeout,
        generator=torch.Generator(),
    )
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    with preserved_generators():
        for number, batch in enumerate(tqdm(chunks, desc="decoding once", leave=False, disable=None)):
            yield layout.pack(batch, min(CHUNK, size - number * CHUNK))


def _map(
    decode: Callable[[], Iterator[tuple[Tensor, Tensor]]], folder: Path, fingerprint: str | None, size: int
) -> TensorSet:
    if fingerprint is None:
        return decode_temporarily(folder, decode)
    return decode_once(folder, f"{fingerprint}, {size} samples in batches", decode).tensors


def _fingerprint_of(dataloader: DataLoader[Any]) -> str | None:
    """That of a Hugging Face data set, which covers its transforms; None if the contents are unknown."""
    fingerprint = getattr(dataloader.dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) and dataloader.collate_fn is default_collate else None


def _check_map_style(dataloader: DataLoader[Any]) -> None:
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(f"dataloader: must be a torch.utils.data.DataLoader, found {type(dataloader).__name__}")
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigError(
            "dataloader: its data set is an IterableDataset, whose samples have no index to find them by again"
        )
    if dataloader.batch_sampler is None:
        raise ConfigError("dataloader: batch_size=None leaves batches to the data set; give it a batch_size")
    if not len(dataloader.dataset):  # type: ignore[arg-type]
        raise DataError("dataloader: its data set is empty")
