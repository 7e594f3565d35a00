"""Decodes the samples of a `DataLoader` once, as rows of tensors or as single samples, and wraps them as datasets.

Torch passes the result of a dataset's `__getitems__` unchanged to the collate function. A decoded dataset can therefore
return a `DeferredBatch`, a call that makes the whole batch. Its collate function runs the call.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from vitmnist.data.random_samples import call_and_check_random, refuse_random_samples
from vitmnist.errors import ConfigError, DataError, as_data_error
from vitmnist.replacement.dataloader_tools import NoRowPerSampleError, collate_batch, fetch_sample, fetch_samples
from vitmnist.replacement.split_transforms import TRANSFORM_ATTRIBUTES, Transform, TransformGuard, list_transforms
from vitmnist.runtime.memory import check_fits
from vitmnist.store.read_in_chunks import MapStyleDataset, WrappedDataset, count_reading_workers, read_in_chunks
from vitmnist.store.rows import StoreOptions, gather_rows, store_rows
from vitmnist.store.samples import EncodedSamples, encode_samples, store_samples_in_file, store_samples_in_memory
from vitmnist.store.tree import TreeStructure, find_difference, flatten_tree, iterate_paths, unflatten_tree

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class RowTensors:
    """Tensors with a row per sample, and the structure of a batch of them."""

    tensors: tuple[Tensor, ...]
    structure: TreeStructure

    @classmethod
    def from_batch(cls, batch: object, size: int) -> RowTensors | None:
        """Flatten a batch. Returns None unless it has tensors, and each has `size` rows."""
        leaves, structure = flatten_tree(batch)
        for leaf in leaves:
            # Gathering would lose the type of a subclass, and `requires_grad`.
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_nested
            if not is_plain or leaf.requires_grad or not leaf.dim() or len(leaf) != size:
                return None
        return cls(tuple(leaves), structure) if leaves else None

    @property
    def signature(self) -> list[str]:
        """The path of each tensor in the batch, with its dtype and its shape per sample."""
        pairs = zip(iterate_paths(self.structure.tree), self.tensors, strict=True)
        return [f"batch{path}: {tensor.dtype} {list(tensor.shape[1:])}" for path, tensor in pairs]

    def gather(self, indices: Sequence[int]) -> Any:
        """Gather a batch of samples. Raises `DataError` for an index out of range."""
        first = ", ".join(map(str, list(indices)[:3]))
        with as_data_error(f"samples have the indices 0 to {len(self.tensors[0]) - 1}, the sampler gives {first}, …"):
            # For 256 indices, `frombuffer` takes a third of the time of `torch.tensor`.
            rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
            gathered = gather_rows(self.tensors, rows)
        return unflatten_tree(gathered, self.structure)


class DecodedDataset(WrappedDataset):
    """A dataset whose samples have been decoded once.

    Attributes, such as `classes`, are forwarded to the original dataset. Setting one does not change samples that are
    already decoded. Subclasses set their own attributes before they call `super().__init__`.

    Args:
        original: the dataset that decodes the samples.
        deterministic: the transforms that have been applied to the samples.
    """

    def __init__(self, original: MapStyleDataset, deterministic: Iterable[Transform]) -> None:
        self._guard = TransformGuard(original, deterministic)
        self.original = original  # From here on, `__setattr__` sets attributes of the original.

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> object:
        """Read a sample from the original. A `DataLoader` over this dataset does not call this method."""
        return self.original[index]

    def __setattr__(self, name: str, value: object) -> None:
        if "original" not in vars(self):
            super().__setattr__(name, value)
            return
        if name not in TRANSFORM_ATTRIBUTES:  # `TransformGuard` detects a change of these.
            warnings.warn(f"dataset.{name} is set, but the samples are already decoded and do not change", stacklevel=2)
        setattr(self.original, name, value)


class DeferredBatch(partial[object]):
    """A call that makes a batch. A decoded dataset returns it from `__getitems__` instead of samples."""

    def __getitem__(self, index: int) -> object:
        raise ConfigError(
            "a DataLoader over a DecodedDataset needs collate_fn=loader.collate_fn, of the loader that from_dataloader "
            "returned (in a Hugging Face Trainer: data_collator=loader.collate_fn and remove_unused_columns=False)"
        )


def materialize_or_collate(collate: Callable[[list[Any]], object], batch: DeferredBatch | list[Any]) -> object:
    """Make a `DeferredBatch`, or collate samples, which a `ConcatDataset` of decoded datasets delivers."""
    return batch() if isinstance(batch, DeferredBatch) else collate(batch)


class RowDataset(DecodedDataset):
    """A decoded dataset that gathers each batch from rows of tensors.

    Args:
        draws_early: draw the order of an epoch in `iter`, like the original's workers, which read ahead. The order is
            then independent of random numbers that the loop draws before the first batch, for example for another
            loader in a `zip`.
    """

    def __init__(self, original: MapStyleDataset, rows: RowTensors, draws_early: bool) -> None:
        self._rows, self._draws_early = rows, draws_early
        super().__init__(original, list_transforms(original))

    def __getitems__(self, indices: Sequence[int]) -> DeferredBatch:
        return DeferredBatch(self._rows.gather, indices)


class TransformedDataset(DecodedDataset):
    """A decoded dataset that transforms a sample each time it is read.

    Args:
        transform: turns a decoded sample into a sample of the original.
    """

    def __init__(
        self,
        original: MapStyleDataset,
        deterministic: Iterable[Transform],
        samples: EncodedSamples,
        transform: Transform,
    ) -> None:
        self._samples, self._transform = samples, transform
        super().__init__(original, deterministic)

    def __getitem__(self, index: int) -> object:
        return self._transform(self._samples.load(index))


class DecodedDataLoader(DataLoader[Any]):
    """A `DataLoader` over a `DecodedDataset`. `iter` raises `ConfigError` if a transform has changed."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A framework can build this class over another dataset, such as a Subset.
        if isinstance(self.dataset, DecodedDataset):
            self.dataset._guard.check()
        batches = super().__iter__()
        if isinstance(self.dataset, RowDataset) and self.dataset._draws_early:
            return chain([*islice(batches, 1)], batches)
        return batches


def decode_rows(dataloader: DataLoader[Any], example: RowTensors, options: StoreOptions) -> RowTensors:
    """Decode all samples of a dataset into rows of tensors.

    Args:
        example: a batch of some samples.

    Raises:
        DataError: a sample cannot be read.
        OutOfSpaceError: memory or disk is too small.
        NoRowPerSampleError: a batch has other tensors than `example`, or collating is random.
    """
    dataset: Any = dataloader.dataset
    size = len(dataset)
    read = partial(_read_rows, dataset, dataloader.collate_fn, example)
    sample_nbytes = sum(tensor[0].nbytes for tensor in example.tensors)
    chunks = partial(_read_all, dataloader, read, sample_nbytes)
    if not options.folder:
        check_fits("ram", sample_nbytes * size, torch.device("cpu"))
    contents = options.fingerprint and f"{options.fingerprint}, {size} samples, {example.signature}"
    files = [str(index) for index in range(len(example.tensors))]
    return RowTensors(store_rows(chunks, size, replace(options, fingerprint=contents), files), example.structure)


def decode_samples(
    dataloader: DataLoader[Any], decode: Callable[[int], object], examples: Sequence[object], options: StoreOptions
) -> EncodedSamples:
    """Decode all samples of a dataset into objects of any structure.

    Args:
        decode: returns the decoded sample for an index.
        examples: decoded samples that the required memory is estimated from.

    Raises:
        DataError: a sample cannot be read or stored. The message names the sample.
        OutOfSpaceError: memory or disk is too small.
    """
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    named_tuples: dict[str, type] | None = {} if options.folder else None
    sample_nbytes = len(encode_samples(examples, named_tuples).blocks[0]) / len(examples)
    chunks = partial(_read_all, dataloader, partial(_read_samples, decode, named_tuples), sample_nbytes)
    if options.folder and named_tuples is not None:
        contents = options.fingerprint and f"{options.fingerprint}, {size} encoded samples"
        return store_samples_in_file(chunks, size, options.folder, contents, named_tuples)
    return store_samples_in_memory(chunks(), int(sample_nbytes * size))


def _read_all(dataloader: DataLoader[Any], read: Callable[[range], Chunk], sample_nbytes: float) -> Iterator[Chunk]:
    """Yield `read(indices)` for ranges that cover all indices, in worker processes if possible."""
    dataset: Any = dataloader.dataset
    workers = count_reading_workers(dataset, dataloader.num_workers)
    context, worker_init_fn = dataloader.multiprocessing_context, dataloader.worker_init_fn
    return read_in_chunks(dataset, read, sample_nbytes, workers, context, worker_init_fn)


def _read_rows(
    dataset: Any, collate: Callable[[list[Any]], object], example: RowTensors, indices: range
) -> tuple[Tensor, ...]:
    """Decode samples into rows.

    Raises:
        RandomSampleError: a sample is random.
        NoRowPerSampleError: samples differ in shape, or collating them is random or gives other rows than `example`.
    """
    with refuse_random_samples(dataset.__getitem__, indices, dataset):
        samples = fetch_samples(dataset, indices)
    if len({tuple(getattr(leaf, "shape", ()) for leaf in flatten_tree(sample)[0]) for sample in samples}) > 1:
        raise NoRowPerSampleError
    middle = 0 if collate is default_collate else len(samples) // 2
    try:
        batch, reason = call_and_check_random(
            partial(collate_batch, collate, samples, indices), collate, always_repeat=False
        )
        rows = None if reason else RowTensors.from_batch(batch, len(indices))
        # In half of the samples, a value that depends on the rest of a batch, such as a mean, would be another one.
        for span in (slice(middle), slice(middle, None)) if middle else ():
            half = RowTensors.from_batch(collate_batch(collate, samples[span], indices[span]), len(indices[span]))
            if not rows or not half or find_difference([*half.tensors], [tensor[span] for tensor in rows.tensors]):
                raise NoRowPerSampleError
    except DataError as error:  # These samples may never form a batch.
        raise NoRowPerSampleError from error
    if not rows or rows.signature != example.signature:
        raise NoRowPerSampleError
    return rows.tensors


def _read_samples(
    decode: Callable[[int], object], named_tuples: dict[str, type] | None, indices: range
) -> EncodedSamples:
    """Decode samples into bytes. Raises `RandomSampleError` if a sample is random."""
    with refuse_random_samples(decode, indices, decode):
        return encode_samples((fetch_sample(decode, index) for index in indices), named_tuples)
