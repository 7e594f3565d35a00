"""Reads all samples of a DataLoader's dataset once, and keeps them in memory, in a file or on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitmnist.data.randomness import refusing_random
from vitmnist.errors import naming
from vitmnist.replacement.batch_rows import BatchRows
from vitmnist.replacement.original import read_batch
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.store.cache_file import decode_once
from vitmnist.store.read_once import read_once, reading_workers
from vitmnist.store.rows import Rows, load_rows
from vitmnist.store.samples import EncodedSamples, Samples, encode_samples, samples_in_file, samples_in_memory
from vitmnist.store.tree import Structure, flatten

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class Location:
    """Where decoded samples are kept; see `from_dataloader`."""

    loader: str
    device: torch.device
    folder: Path
    fingerprint: str | None


def keep_rows(dataloader: DataLoader[Any], first: BatchRows, location: Location, fingerprint: str | None) -> BatchRows:
    """All samples of a dataset as rows of tensors.

    Args:
        first: some of them.
        fingerprint: identifies them in a file for other processes.

    Raises:
        DataError: a sample cannot be read.
        DoesNotFitError: memory or disk is too small.
        NoRowsError: a batch is not like `first`.
    """
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    read = partial(_read_rows, dataloader.dataset, dataloader.collate_fn, first)
    chunks = partial(_read_once, dataloader, dataloader.dataset, read, first.sample_nbytes)
    if location.loader == "cache":
        contents = fingerprint and f"{fingerprint}, {size} samples, {first.signature}"
        files = [str(index) for index in range(len(first.names))]
        entry = decode_once(location.folder, contents, size, chunks, names=files)
        return BatchRows(Rows(entry.tensors, entry.checksums), first.names, first.structure)
    needed = first.sample_nbytes * size
    on_device = location.loader == "gpu_slice"
    is_cuda = on_device and location.device.type == "cuda"
    check_fits(location.loader, Memory(needed, needed if is_cuda else 0), location.device)
    rows = load_rows(chunks(), size)
    if on_device:
        rows = Rows(tuple(tensor.to(location.device) for tensor in rows.tensors))
    return BatchRows(rows, first.names, first.structure)


def keep_samples(source: Any, probes: Sequence[Any], dataloader: DataLoader[Any], location: Location) -> Samples:
    """All samples of `source`, of any structure.

    Args:
        probes: some of them, by which the memory is estimated.
        dataloader: whose settings for workers are used.

    Raises:
        DataError: a sample cannot be read or kept; names it.
        DoesNotFitError: memory or disk is too small.
    """
    size, structure = len(source), flatten(probes[0])[1] if location.loader == "cache" else None
    sample_nbytes = len(encode_samples(probes, structure).content) / len(probes)
    chunks = partial(_read_once, dataloader, source, partial(_read_samples, source, structure), sample_nbytes)
    if structure:
        contents = location.fingerprint and f"{location.fingerprint}, {size} samples of {structure}"
        return samples_in_file(chunks, size, structure, location.folder, contents)
    return samples_in_memory(chunks(), int(sample_nbytes * size))


def _read_once(
    dataloader: DataLoader[Any], source: Any, read: Callable[[range], Chunk], sample_nbytes: float
) -> Iterator[Chunk]:
    """What `read` makes of all samples of `source`; raises `RandomSampleError` if one of them is random."""
    return read_once(
        dataloader.dataset,
        partial(_read_fixed, source, read),
        sample_nbytes,
        reading_workers(dataloader.dataset, dataloader.num_workers),
        dataloader.multiprocessing_context,
        dataloader.worker_init_fn,
    )


def _read_fixed(source: Any, read: Callable[[range], Chunk], indices: range) -> Chunk:
    with refusing_random(source.__getitem__, indices, source):
        return read(indices)


def _read_rows(dataset: Any, collate: Callable[[Any], Any], first: BatchRows, indices: range) -> tuple[Tensor, ...]:
    chunk = BatchRows.of(read_batch(dataset, collate, indices), len(indices))
    first.check_same(chunk)
    return chunk.rows.tensors


def _read_samples(source: Any, structure: Structure | None, indices: range) -> EncodedSamples:
    def samples() -> Iterator[Any]:
        for index in indices:
            with naming(f"sample {index}"):
                yield source[index]

    return encode_samples(samples(), structure)
