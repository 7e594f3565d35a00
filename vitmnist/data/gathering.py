"""Replaces a `DataLoader` whose samples are not random: all are kept as rows of tensors, and batches are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from vitmnist.data.batch_tensors import BatchTensors, find_difference
from vitmnist.data.dataloaders import EagerDataLoader, read_batch, rebuilt
from vitmnist.data.decoded_cache import decode_once, decode_temporarily
from vitmnist.data.decoded_dataset import CollateGathered, DecodedDataset, GatheredDataset, Store
from vitmnist.data.decoding import CHUNK, PROBES, load_chunks
from vitmnist.data.frozen_state import FrozenState
from vitmnist.data.samples import naming
from vitmnist.data.seeding import refusing_draws
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.memory import Memory, check_fits

COMPARED = 3  # batches that are compared with the original before the replacement is returned


def gathered(dataloader: DataLoader[Any], store: Store, workers: int, state: FrozenState) -> Any:
    """The replacement of a `DataLoader`; raises as `from_dataloader`.

    Args:
        workers: of the replacement.
        state: of the dataset now.
    """
    if store.name == "gpu_slice" and workers:
        raise ConfigError(
            f"gpu_slice: num_workers={workers}, and workers cannot deliver from the device; give from_dataloader "
            "num_workers=0, which keeps the order unless it depends on how far workers read ahead"
        )
    dataset: Any = dataloader.dataset
    size, device = len(dataset), store.device
    first = BatchTensors.of(read_batch(dataset, dataloader.collate_fn, range(min(size, 2))), min(size, 2))
    chunks = partial(_chunks, dataloader, first)
    files = [str(number) for number in range(len(first.tensors))]
    fingerprint = store.fingerprint
    if default_collate is dataloader.collate_fn:
        fingerprint = fingerprint or getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset
    if store.name == "cache" and fingerprint:
        contents = f"{fingerprint}, {size} samples, {first.forms}"
        tensors = decode_once(store.folder, contents, size, chunks, names=files).mapped
    elif store.name == "cache":
        tensors = decode_temporarily(store.folder, size, chunks, files)
    else:
        needed = first.sample_nbytes * size
        on_device = needed if (store.name, device.type) == ("gpu_slice", "cuda") else 0
        check_fits(store.name, Memory(needed, on_device), device)
        tensors = load_chunks(chunks(), size)
    if store.name == "gpu_slice":
        tensors = tuple(tensor.to(device) for tensor in tensors)
    batches = replace(first, tensors=dict(zip(first.tensors, tensors, strict=True)))
    _check_batches(dataloader, batches, size)
    return rebuilt(
        dataloader,
        EagerDataLoader if dataloader.num_workers and not workers else DataLoader,
        dataset=GatheredDataset(dataset, state, batches),
        collate_fn=CollateGathered(dataloader.collate_fn),
        num_workers=workers,
        pin_memory=dataloader.pin_memory and store.name != "gpu_slice",
    )


def _check_batches(dataloader: DataLoader[Any], batches: BatchTensors, size: int) -> None:
    """Raise `DataError` if a batch of the decoded samples is not what the collate function makes of them."""
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    # Batches of one too: where a batch is padded to its longest sample, all large ones may be equally long.
    for part in (*shuffled.split(dataloader.batch_size or CHUNK)[:COMPARED], *shuffled[:PROBES].split(1)):
        indices = part.tolist()
        expected = read_batch(dataloader.dataset, dataloader.collate_fn, indices)
        if difference := find_difference(batches.gather(indices), expected):
            raise DataError(
                f"{difference} of samples {', '.join(map(str, indices[:3]))}, … is not what the DataLoader makes of "
                "them: it depends on the other samples of the batch (pad to a fixed length), it is random at times "
                "(use the DataLoader as it is), or fingerprint= names other contents (give another one)"
            )


def _chunks(dataloader: DataLoader[Any], first: BatchTensors) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of all samples in their order, in chunks; with the workers of the `DataLoader`."""
    settings = {"sampler": None, "drop_last": False, "generator": torch.Generator(), "pin_memory": False}
    chunks = rebuilt(dataloader, dataset=_ReadOnce(dataloader.dataset), batch_size=CHUNK, **settings)
    chunks.is_internal = True  # `vitmnist diagnose` observes the user's alone
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    try:
        for number, batch in enumerate(tqdm(chunks, desc="decoding once", leave=False, disable=None)):
            chunk = BatchTensors.of(batch, min(CHUNK, size - number * CHUNK))
            first.check_same(chunk)
            yield tuple(chunk.tensors.values())
    except DataError as error:  # of a worker, torch makes its traceback the message
        raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error


class _ReadOnce(DecodedDataset):
    """The samples of a dataset, a chunk at a time; to the user's `worker_init_fn` it looks like that dataset."""

    def __init__(self, original: Any) -> None:
        self.__dict__.update(original=original)

    def __len__(self) -> int:
        return len(self.original)

    def __getitems__(self, indices: list[int]) -> Any:
        """The samples; raises `DataError` if reading one fails or draws a random number."""
        with refusing_draws(indices):
            if hasattr(self.original, "__getitems__"):
                return self.original.__getitems__(indices)
            samples = []
            for index in indices:
                with naming(index):
                    samples.append(self.original[index])
            return samples
