"""Reads all samples of a `DataLoader` once, and keeps them as rows of the tensors of a batch, or one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitmnist.data.randomness import refuse_random_samples
from vitmnist.errors import DataError
from vitmnist.replacement.original import NoRowsError, fetch_batch, fetch_sample
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.store.read_once import read_once, reading_workers
from vitmnist.store.rows import Location, Storage, gather_rows, store_rows
from vitmnist.store.samples import Samples, encode_samples, samples_in_file, samples_in_memory
from vitmnist.store.tree import Structure, flatten, unflatten

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class BatchRows:
    """The tensors of a batch, each with one row per sample, and how they are nested in it."""

    tensors: tuple[Tensor, ...]
    structure: Structure

    @classmethod
    def from_batch(cls, batch: object, size: int) -> BatchRows:
        """The tensors of a batch of `size` samples.

        Raises:
            NoRowsError: the batch has something other than tensors with a row for each sample.
        """
        leaves, structure = flatten(batch)
        if not leaves:
            raise NoRowsError("the batch has no tensor")
        for path, leaf in zip(structure.paths(), leaves, strict=True):
            # A tensor of a subclass, or one with a gradient, would not be delivered as such.
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_nested
            if not is_plain or leaf.requires_grad or not leaf.dim() or len(leaf) != size:
                raise NoRowsError(f"batch{path} is no plain tensor with a row for each sample")
        return cls(tuple(leaves), structure)

    @property
    def signature(self) -> list[str]:
        """The path of each tensor in the batch, with its dtype and its shape per sample."""
        pairs = zip(self.structure.paths(), self.tensors, strict=True)
        return [f"batch{path}: {tensor.dtype} {list(tensor.shape[1:])}" for path, tensor in pairs]

    @property
    def sample_nbytes(self) -> int:
        """Bytes of a sample."""
        return sum(tensor[0].nbytes for tensor in self.tensors)

    def gather(self, indices: Sequence[int]) -> Any:
        """The batch of these samples; raises `DataError` for an index that no sample has."""
        size = len(self.tensors[0])
        try:
            # For 256 numbers, this takes a third of the time of torch.tensor.
            rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
            if rows.min() < 0 or rows.max() >= size:  # On a GPU, index_select would end the process.
                raise IndexError
        except (IndexError, TypeError) as error:
            shown = ", ".join(map(str, list(indices)[:3]))
            raise DataError(
                f"the sampler gives {shown}, …; decoded samples have the indices 0 to {size - 1}"
            ) from error
        backend = backend_of(self.tensors[0].device)
        if backend.is_async:  # The host would wait for a copy of pageable memory, and for all work before it.
            rows = backend.to_device(backend.empty_pinned(rows.shape, rows.dtype).copy_(rows))
        return unflatten(gather_rows(self.tensors, rows), self.structure)


def decode_rows(dataloader: DataLoader[Any], example: BatchRows, location: Location) -> BatchRows:
    """All samples of a dataset as rows of tensors.

    Args:
        example: a batch of some samples.

    Raises:
        DataError: a sample cannot be read.
        DoesNotFitError: memory or disk is too small.
        NoRowsError: a batch has other tensors than `example`.
    """
    dataset: Any = dataloader.dataset
    size = len(dataset)
    read = partial(_read_rows, dataset, dataloader.collate_fn, example)
    chunks = partial(_read_all, dataloader, read, example.sample_nbytes)
    if location.storage is not Storage.FILE:
        needed = example.sample_nbytes * size
        is_cuda = location.storage is Storage.DEVICE and location.device.type == "cuda"
        check_fits(location.storage.value, Memory(needed, needed if is_cuda else 0), location.device)
    contents = location.fingerprint and f"{location.fingerprint}, {size} samples, {example.signature}"
    files = [str(index) for index in range(len(example.tensors))]
    return BatchRows(store_rows(chunks, size, replace(location, fingerprint=contents), files), example.structure)


def decode_samples(
    dataloader: DataLoader[Any], decode: Callable[[int], object], examples: Sequence[object], location: Location
) -> Samples:
    """The results of `decode` for all indices of a dataset, objects of any structure.

    Args:
        examples: some decoded samples, from which the memory is estimated.

    Raises:
        DataError: a sample cannot be read or kept; the message names it.
        DoesNotFitError: memory or disk is too small.
    """
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    structure = flatten(examples[0])[1] if location.storage is Storage.FILE else None
    sample_nbytes = len(encode_samples(examples, structure).blocks[0]) / len(examples)
    chunks = partial(_read_all, dataloader, partial(_read_samples, decode, structure), sample_nbytes)
    if structure:
        contents = location.fingerprint and f"{location.fingerprint}, {size} samples of {structure}"
        return samples_in_file(chunks, size, structure, location.folder, contents)
    return samples_in_memory(chunks(), int(sample_nbytes * size))


def _read_all(dataloader: DataLoader[Any], read: Callable[[range], Chunk], sample_nbytes: float) -> Iterator[Chunk]:
    """The results of `read` for ranges of all indices, in the workers of a DataLoader if it has some."""
    dataset: Any = dataloader.dataset
    workers = reading_workers(dataset, dataloader.num_workers)
    context, worker_init_fn = dataloader.multiprocessing_context, dataloader.worker_init_fn
    return read_once(dataset, read, sample_nbytes, workers, context, worker_init_fn)


def _read_rows(
    dataset: Any, collate: Callable[[list[Any]], object], example: BatchRows, indices: range
) -> tuple[Tensor, ...]:
    """The rows of some samples; raises `RandomSampleError` if one is random."""
    with refuse_random_samples(dataset.__getitem__, indices, dataset):
        rows = BatchRows.from_batch(fetch_batch(dataset, collate, indices), len(indices))
    if (rows.structure, rows.signature) != (example.structure, example.signature):
        contents, other_contents = ", ".join(example.signature), ", ".join(rows.signature)
        raise NoRowsError(f"one batch has {other_contents} per sample, and another {contents}")
    return rows.tensors


def _read_samples(decode: Callable[[int], object], structure: Structure | None, indices: range) -> Samples:
    """Some samples as bytes; raises `RandomSampleError` if one is random."""
    with refuse_random_samples(decode, indices, decode):
        return encode_samples((fetch_sample(decode, index) for index in indices), structure)
