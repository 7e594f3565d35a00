"""A replacement for a torch `DataLoader`: the same batches, from samples that are decoded once."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from tqdm import tqdm

from vitmnist.data.batch_layout import BatchLayout, find_difference
from vitmnist.data.collate import map_tensors
from vitmnist.data.decoded_cache import decode_once, decode_temporarily
from vitmnist.data.decoding import CHUNK, PROBES, find_random, load_chunks
from vitmnist.data.drawn_batches import DrawnBatches
from vitmnist.data.loaders.base import LOADERS, Loader
from vitmnist.data.loaders.cache import CacheOptions
from vitmnist.data.loaders.pinned import HostLoader
from vitmnist.data.loaders.prefetch import PrefetchOptions, Producer
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, DataError, UserError, choices, first_line
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
            device, in memory, or in a memory-mapped file; what does not fit on the device, gpu_slice keeps in memory.
            prefetch decodes as before, but in a background thread, a few batches ahead: if an epoch is left early, the
            sampler has drawn more than the DataLoader's would have. auto takes the first that fits: gpu_slice (with a
            GPU), ram, cache; or prefetch if the samples cannot be kept.
        device: where the batches are delivered; auto is the first CUDA device, or the CPU.
        folder: of the files of cache.
        fingerprint: names the decoded contents, so that later processes find them in `folder`; by default that of a
            Hugging Face data set with torch's own collate function. Without one, the file is for this process only.

    Raises:
        ConfigError: a loader that is unknown or cannot be used; random samples, which decoding once would freeze.
        DataError: samples that cannot be kept as rows of tensors, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    allowed = (*KEEPS_SAMPLES, "prefetch", "auto")
    if loader not in allowed:
        raise ConfigError(f"loader={loader}: {choices(loader, allowed)}")
    check_replaceable(dataloader)
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
        try:
            with preserved_generators():
                tensors = self._decode_once(Path(folder).expanduser(), fingerprint, device)
        except (ConfigError, OSError):
            raise
        except Exception as error:  # samples and collate function may fail in any way
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{loader}: {reason}; use loader='prefetch', which keeps no samples") from error
        self._sampler = DrawnBatches(dataloader)
        self._loader: Loader
        if loader == "gpu_slice":
            self._loader = LOADERS.build(LOADERS.complete({"name": loader}), tensors, self._sampler, device)
        else:
            self._loader = HostLoader(tensors, self._sampler, device)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = self._loader.epoch(self._sampler.begin_epoch())
        return (self._layout.unpack(*rows) for rows in batches)

    @property
    def sample_nbytes(self) -> int:
        """Bytes that a decoded sample takes."""
        return self._layout.nbytes

    def close(self) -> None:
        self._loader.close()

    def _decode_once(self, folder: Path, fingerprint: str | None, device: torch.device) -> TensorSet:
        """All samples as rows of two tensors, compared with batches of the DataLoader's own."""
        dataloader, name = self.dataloader, self.loader
        if hasattr(dataloader.dataset, "set_epoch"):
            raise ConfigError(f"{name}: the data set has set_epoch: its samples change; use loader='prefetch'")
        if random := find_random(dataloader.dataset, dataloader.collate_fn):
            raise ConfigError(
                f"{name}: {random} is random: it differs when it is read twice, and {name} would repeat one version of "
                "it; use loader='prefetch', or move the random transform from the samples to the batches on the device"
            )
        size = len(dataloader.dataset)  # type: ignore[arg-type]
        first = range(min(size, 2))
        self._layout = BatchLayout.of(_read(dataloader, first), len(first))
        decode = partial(_decode, dataloader, self._layout)
        if name == "cache" and (fingerprint := fingerprint or _fingerprint_of(dataloader)):
            tensors = decode_once(folder, f"{fingerprint}, {size} samples, {self._layout.forms}", size, decode).tensors
        elif name == "cache":
            tensors = decode_temporarily(folder, size, decode)
        else:
            check_fits(name, Memory(host=self._layout.nbytes * size), device)
            tensors = load_chunks(decode(), size)
        self._check_batches(tensors)
        return tensors

    def _check_batches(self, tensors: TensorSet) -> None:
        """Raise `DataError` if a batch of the decoded samples is not what the collate function makes of them."""
        shuffled = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(0))
        # Batches of one too: where a batch is padded to its longest sample, all large ones may be equally long.
        batches = [*shuffled.split(self.dataloader.batch_size or CHUNK)[:COMPARED], *shuffled[:PROBES].split(1)]
        for indices in batches:
            found = self._layout.unpack(tensors.images[indices], tensors.labels[indices])
            if place := find_difference(found, _read(self.dataloader, indices.tolist())):
                named = ", ".join(map(str, indices[:3].tolist()))
                raise DataError(
                    f"{place} of samples {named}, … is not what the DataLoader makes of them: it depends on the other "
                    "samples of the batch, or fingerprint= names other contents"
                )


class PrefetchedDataLoader(ReplacedDataLoader):
    """Lets the `DataLoader` work in a background thread. See `from_dataloader`."""

    def __init__(self, dataloader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(dataloader, "prefetch")
        has_workers = dataloader.num_workers > 0
        if not has_workers and (random := find_random(dataloader.dataset, dataloader.collate_fn)):
            raise ConfigError(
                f"prefetch: {random} is random, and with num_workers=0 it would share its random generators with the "
                "training loop; give the DataLoader num_workers=1 or more"
            )
        self._sampler = None if has_workers else DrawnBatches(dataloader, least_ahead=1)
        in_queue = PrefetchOptions().queue_size + 1  # the thread holds one more, for which there is no room
        self.buffered = in_queue + dataloader.num_workers * (dataloader.prefetch_factor or 0)
        self._accelerator = accelerator_of(device)
        self._stream = self._accelerator.new_stream()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        # The epoch begins here, and not in the thread, which would share the random generators with the training loop.
        batches: Iterator[Any]
        if self._sampler is not None:
            drawn = self._sampler.batches(self._sampler.begin_epoch())
            batches = (_read(self.dataloader, indices.tolist()) for indices in drawn)
        else:
            if self.dataloader.persistent_workers:  # it has a single iterator, which no thread may use any more
                for producer in list(self._producers):
                    producer.stop()
                    producer.join()
            batches = iter(self.dataloader)
        to_device = partial(map_tensors, self._accelerator.to_device)
        queue_size = PrefetchOptions().queue_size
        producer = Producer(lambda: map(to_device, batches), queue_size, None, self._accelerator, self._stream)
        self._producers.add(producer)
        return producer.run()

    def close(self) -> None:
        for producer in list(self._producers):
            producer.stop()


def _read(dataloader: DataLoader[Any], indices: Sequence[int]) -> Any:
    """The batch that a `DataLoader` makes of these samples."""
    dataset: Any = dataloader.dataset
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
    chunks.is_internal = True  # python -m vitmnist.diagnose observes the user's alone
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    for number, batch in enumerate(tqdm(chunks, desc="decoding once", leave=False, disable=None)):
        yield layout.pack(batch, min(CHUNK, size - number * CHUNK))


def _fingerprint_of(dataloader: DataLoader[Any]) -> str | None:
    """That of a Hugging Face data set, which covers its transforms; None if the contents are unknown."""
    fingerprint = getattr(dataloader.dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) and dataloader.collate_fn is default_collate else None


def check_replaceable(dataloader: Any) -> None:
    """Raise `ConfigError` or `DataError` if this DataLoader has no batches of samples with an index."""
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(f"dataloader: must be a torch.utils.data.DataLoader, found {type(dataloader).__name__}")
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"dataloader: {type(dataloader).__name__} iterates in its own way; give the DataLoader that it wraps, or "
            "build a plain one"
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigError(
            "dataloader: its data set is an IterableDataset, whose samples have no index to find them by again"
        )
    if dataloader.batch_sampler is None:
        raise ConfigError("dataloader: batch_size=None leaves batches to the data set; give it a batch_size")
    if not len(dataloader.dataset):  # type: ignore[arg-type]
        raise DataError("dataloader: its data set is empty")
