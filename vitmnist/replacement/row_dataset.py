"""Replaces a `DataLoader` whose batches are tensors with a row per sample: a batch is gathered from decoded rows.

Some samples, each decoded chunk of samples and some batches are checked for such rows. `NoRowPerSampleError` tells
`from_dataloader` to store single samples instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from vitmnist.data.random_samples import call_and_check_random, refuse_random_samples
from vitmnist.errors import DataError, as_data_error
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, DecodedDataset, DeferredBatch
from vitmnist.replacement.original_dataloader import (
    COMPARED_SIZE,
    check_same_batches,
    collate_batch,
    fetch_samples,
    order_depends_on_workers,
    read_all,
)
from vitmnist.runtime.memory import check_fits
from vitmnist.store.rows import StoreOptions, gather_rows, store_rows
from vitmnist.store.tree import copy_tree, find_difference, flatten_tree, iterate_paths, unflatten_tree


class NoRowPerSampleError(DataError):
    """A batch is not a tree of tensors whose rows depend on one sample each."""


@dataclass(frozen=True)
class RowTensors:
    """Tensors with a row per sample, and the structure of a batch of them."""

    tensors: tuple[Tensor, ...]
    structure: object

    @classmethod
    def from_batch(cls, batch: object, size: int) -> RowTensors:
        """Flatten a batch. Raises `NoRowPerSampleError` unless it has tensors, and each has `size` rows."""
        leaves, structure = flatten_tree(batch)
        for leaf in leaves:
            # Gathering would lose the type of a subclass, and `requires_grad`.
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_nested
            if not is_plain or leaf.requires_grad or not leaf.dim() or len(leaf) != size:
                raise NoRowPerSampleError
        if not leaves:
            raise NoRowPerSampleError
        return cls(tuple(leaves), structure)

    @property
    def signature(self) -> list[str]:
        """The path of each tensor in the batch, with its dtype and its shape per sample."""
        pairs = zip(iterate_paths(self.structure), self.tensors, strict=True)
        return [f"batch{path}: {tensor.dtype} {list(tensor.shape[1:])}" for path, tensor in pairs]

    def gather(self, indices: Sequence[int]) -> Any:
        """Gather a batch of samples. Raises `DataError` for an index out of range."""
        first = ", ".join(map(str, list(indices)[:3]))
        last = len(self.tensors[0]) - 1
        with as_data_error(f"the sampler gives {first}, …, not only 0 to {last}; use the DataLoader as it is"):
            # For 256 indices, `frombuffer` takes a third of the time of `torch.tensor`.
            gathered = gather_rows(self.tensors, torch.frombuffer(array("q", indices), dtype=torch.int64))
        return unflatten_tree(gathered, self.structure)


class RowDataset(DecodedDataset):
    """A decoded dataset that gathers each batch from rows of tensors."""

    row_tensors: RowTensors

    def __getitems__(self, indices: Sequence[int]) -> DeferredBatch:
        return DeferredBatch(self.row_tensors.gather, indices)


def replace_by_rows(
    dataloader: DataLoader[Any], options: StoreOptions, probes: Sequence[int], samples: Sequence[Any]
) -> DataLoader[Any]:
    """Build a replacement that gathers rows, or raise `NoRowPerSampleError`. The samples are those at `probes`."""
    dataset: Any = dataloader.dataset
    collate = dataloader.collate_fn
    size = min(dataloader.batch_size or COMPARED_SIZE, len(samples))
    example = _collate_rows(collate, list(samples[:size]), probes[:size], always_repeat=True)
    sample_nbytes = sum(tensor[0].nbytes for tensor in example.tensors)
    if not options.folder:
        check_fits("ram", sample_nbytes * len(dataset), torch.device("cpu"))
    chunks = partial(read_all, dataloader, partial(_read_rows, dataset, collate, example), sample_nbytes)
    contents = options.fingerprint and f"{options.fingerprint}, {len(dataset)} samples, {example.signature}"
    files = [str(index) for index in range(len(example.tensors))]
    tensors = store_rows(chunks, len(dataset), replace(options, fingerprint=contents), files)
    rows = RowTensors(tensors, example.structure)
    # Gathering a batch takes less time than receiving it from a worker.
    workers = dataloader.num_workers if order_depends_on_workers(dataloader) else 0
    decoded = RowDataset(dataset, row_tensors=rows, draws_early=workers < dataloader.num_workers)
    replacement = DecodedDataLoader.from_original(dataloader, decoded, workers)
    try:
        check_same_batches(dataloader, replacement, single_samples=True)
    except DataError as error:
        if options.fingerprint:  # The file of a fingerprint can hold other samples.
            raise
        raise NoRowPerSampleError from error
    return replacement


def _read_rows(
    dataset: Any, collate: Callable[[list[Any]], object], example: RowTensors, indices: range
) -> tuple[Tensor, ...]:
    """Decode samples into rows.

    Raises `NoRowPerSampleError` if samples differ in shape, or if collating them is random or gives other rows than
    `example`, and `RandomSampleError` if a sample is random.
    """
    with refuse_random_samples(dataset.__getitem__, indices, dataset):
        samples = fetch_samples(dataset, indices)
    if len({tuple(getattr(leaf, "shape", ()) for leaf in flatten_tree(sample)[0]) for sample in samples}) > 1:
        raise NoRowPerSampleError
    middle = 0 if collate is default_collate else len(samples) // 2
    try:
        rows = _collate_rows(collate, samples, indices, always_repeat=False)
        # A value that depends on the whole batch, such as a mean, would differ in a batch of half of the samples.
        for span in [slice(middle), slice(middle, None)] if middle else []:
            half = RowTensors.from_batch(collate_batch(collate, samples[span], indices[span]), len(indices[span]))
            if find_difference([*half.tensors], [tensor[span] for tensor in rows.tensors]):
                raise NoRowPerSampleError
    except DataError as error:  # These samples may never form a batch.
        raise NoRowPerSampleError from error
    if rows.signature != example.signature:
        raise NoRowPerSampleError
    return rows.tensors


def _collate_rows(
    collate: Callable[[list[Any]], object], samples: list[Any], indices: Sequence[int], *, always_repeat: bool
) -> RowTensors:
    """Collate samples into rows. `always_repeat` is as in `call_and_check_random`."""

    def make_batch() -> object:
        # The second call needs unchanged samples, and a collate function can modify them.
        return collate_batch(collate, copy_tree(samples) if always_repeat else samples, indices)

    batch, reason = call_and_check_random(make_batch, collate, always_repeat=always_repeat)
    if reason:
        raise NoRowPerSampleError
    return RowTensors.from_batch(batch, len(indices))
