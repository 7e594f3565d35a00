"""Replaces a `DataLoader` by a `DataLoader` with the same batches that decodes each sample only once."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate

from vitmnist.data.random_samples import RandomSampleError, call_and_check_random, choose_probes
from vitmnist.errors import ConfigError, DataError, UserError, format_error, suggest_names
from vitmnist.replacement.dataloader_tools import (
    COMPARED_SIZE,
    NoRowPerSampleError,
    check_replaceable,
    check_same_batches,
    collate_batch,
    fetch_sample,
    order_depends_on_workers,
    rebuild,
)
from vitmnist.replacement.decoded_dataset import (
    DecodedDataLoader,
    DecodedDataset,
    RowDataset,
    RowTensors,
    TransformedDataset,
    decode_rows,
    decode_samples,
    materialize_or_collate,
)
from vitmnist.replacement.split_transforms import SplitTransforms, Transform, list_transforms
from vitmnist.replacement.tensor_dataset import TensorTransformDataset, ThreadedDataLoader, check_rounding
from vitmnist.replacement.tensor_transforms import build_tensor_pipeline
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import OutOfSpaceError, keep_freed_memory
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.read_in_chunks import return_unchanged
from vitmnist.store.rows import StoreOptions
from vitmnist.store.tree import copy_tree

LOADER_NAMES = ("auto", "ram", "cache")
"""The values of the argument `loader`."""
TRANSFORM_MODES = ("exact", "tensor")
"""The values of the argument `transforms`."""


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    folder: str = DEFAULT_FOLDER,
    fingerprint: str | None = None,
    transforms: Literal["exact", "tensor"] = "exact",
) -> DataLoader[Any]:
    """Return a `DataLoader` with the same batches, in the same order, over samples that are decoded once.

    It has the arguments of the original, so Accelerate and Lightning shard it in the same way. Its `dataset` is a
    `DecodedDataset`. It has workers only if the order or random transforms depend on them, because gathering a batch
    takes less time than receiving it from a worker. A sampler must not yield negative indices. A replacement is
    returned unchanged.

    If samples are random, the transforms of the dataset are split at the first random transform. The transforms before
    it are applied once. The others are applied in each epoch, in the workers of the original or, with
    transforms="tensor", in threads. The transforms are the attributes `transform` and `transforms` of the dataset, or
    of the datasets in a `Subset` or `ConcatDataset`.

    A sample is random if reading it uses a random generator, unless the sample seeds the generator. All samples are
    checked while they are decoded. The module `secrets` and generators that are created for each sample, such as
    `default_rng()`, are not detected. Later changes of the transforms are an error. Later changes of the data are not
    detected.

    Args:
        loader: where the samples are stored. ram: in memory. cache: in a memory-mapped file. auto: ram, or cache if
            they do not fit in memory. If the samples cannot be stored, auto warns and returns the original. With
            transforms="tensor", it raises an error instead.
        folder: where cache writes its files.
        fingerprint: identifies the decoded contents in `folder` for later processes. Without it, only this process uses
            the file.
        transforms: the inputs of the random transforms. exact: unchanged, for example PIL images. Batches are equal bit
            for bit. tensor: uint8 tensors `[C, H, W]`, for torchvision's common transforms. The same parameters are
            drawn, but resizing and colours round differently.

    Raises:
        ConfigError: an argument is unknown or cannot be used, or samples are random apart from their transforms. With
            transforms="tensor", a transform is not supported, or pixels differ by more than rounding.
        DataError: samples cannot be read or stored, or batches differ from the original's.
        OutOfSpaceError: memory or the disk of `folder` is too small.
    """
    if loader not in LOADER_NAMES:
        raise ConfigError(f"loader={loader}: {suggest_names(loader, LOADER_NAMES)}")
    if transforms not in TRANSFORM_MODES:
        raise ConfigError(f"transforms={transforms}: {suggest_names(transforms, TRANSFORM_MODES)}")
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        return dataloader
    if choose_device("auto").type == "cpu":
        keep_freed_memory()
    in_memory, in_file = StoreOptions(), StoreOptions(Path(folder).expanduser(), fingerprint)
    to_tensors = transforms == "tensor"
    if loader != "auto":
        return _replace(dataloader, in_memory if loader == "ram" else in_file, to_tensors)
    try:
        try:
            return _replace(dataloader, in_memory, to_tensors)
        except OutOfSpaceError:
            return _replace(dataloader, in_file, to_tensors)
    except UserError as error:
        if to_tensors:
            raise
        warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {error}", stacklevel=2)
        return dataloader


def _replace(dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool) -> DataLoader[Any]:
    """Build a replacement that stores its samples as `options` say. Raises the errors of `from_dataloader`."""
    check_replaceable(dataloader)
    name = "cache" if options.folder else "ram"
    try:
        with preserve_random_state(dataloader.dataset, dataloader.collate_fn):
            return _build(dataloader, options, to_tensors)
    except RandomSampleError as error:
        raise ConfigError(
            f"{name}: {error} apart from the transforms in the attributes transform and transforms of the dataset (not "
            "of its class), or a transform keeps a state from sample to sample; move all random steps there, or use "
            "the DataLoader as it is"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # The dataset and the collate function can raise any error.
        raise DataError(f"{name}: {format_error(error)}") from error


def _build(dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool) -> DataLoader[Any]:
    """Build the kind of replacement that fits some samples, the probes.

    Only decoding all samples shows whether the others are like the probes. If one is random, it becomes a probe. If
    batches turn out to have no rows, samples are stored one by one.

    Raises:
        RandomSampleError: a sample is random apart from its transforms.
    """
    dataset: Any = dataloader.dataset
    probes, may_have_rows = choose_probes(len(dataset)), True
    while True:
        try:
            if _is_any_random(dataset, probes):
                return _build_with_transforms(dataloader, options, SplitTransforms(dataset, probes), to_tensors)
            samples = [fetch_sample(dataset.__getitem__, index) for index in probes]
            example = _collate_rows(dataloader, probes, samples) if may_have_rows else None
            if example:
                return _build_from_rows(dataloader, options, example)
            transforms = list_transforms(dataset)
            return _build_from_samples(dataloader, options, samples, dataset.__getitem__, return_unchanged, transforms)
        except RandomSampleError as error:
            if error.index in probes:
                raise
            probes = sorted({*probes, error.index})
        except NoRowPerSampleError:
            may_have_rows = False


def _is_any_random(dataset: Any, indices: Sequence[int]) -> bool:
    """Whether one of the samples is random. The first sample is read twice and compared."""
    for index in indices:
        read = partial(fetch_sample, dataset.__getitem__, index)
        if call_and_check_random(read, dataset, always_repeat=index == indices[0])[1]:
            return True
    return False


def _collate_rows(dataloader: DataLoader[Any], indices: Sequence[int], samples: Sequence[Any]) -> RowTensors | None:
    """Collate samples to a batch. Returns None if collating is random, or if the batch has no row for each sample."""
    size = min(dataloader.batch_size or COMPARED_SIZE, len(samples))

    def collate() -> object:
        return collate_batch(dataloader.collate_fn, copy_tree(list(samples[:size])), indices)

    roots = dataloader.dataset, dataloader.collate_fn
    batch, reason = call_and_check_random(collate, roots, always_repeat=True)
    return None if reason else RowTensors.from_batch(batch, size)


def _build_from_rows(dataloader: DataLoader[Any], options: StoreOptions, example: RowTensors) -> DataLoader[Any]:
    """Build a replacement that gathers batches from rows of tensors.

    Args:
        example: a batch of the original.

    Raises:
        NoRowPerSampleError: a batch cannot be gathered from rows.
    """
    dataset: Any = dataloader.dataset
    rows = decode_rows(dataloader, example, options)
    keeps_workers = order_depends_on_workers(dataloader)
    draws_early = dataloader.num_workers > 0 and not keeps_workers
    replacement = rebuild(
        dataloader,
        DecodedDataLoader,
        dataset=RowDataset(dataset, rows, draws_early),
        collate_fn=partial(materialize_or_collate, dataloader.collate_fn),
        num_workers=dataloader.num_workers if keeps_workers else 0,
    )
    try:
        check_same_batches(dataloader, replacement, with_single_samples=True)
    except DataError as error:  # The file of a fingerprint can hold other samples.
        raise error if options.fingerprint else NoRowPerSampleError from error
    return replacement


def _build_with_transforms(
    dataloader: DataLoader[Any], options: StoreOptions, split: SplitTransforms, to_tensors: bool
) -> DataLoader[Any]:
    """Build a replacement that applies random transforms in workers, or to tensors in threads.

    Raises:
        RandomSampleError: a sample is random apart from the random transforms of `split`.
        ConfigError: the transforms cannot be applied to tensors, or the pixels differ by more than rounding.
    """
    if to_tensors:
        if dataloader.collate_fn is not default_collate:
            raise ConfigError("transforms='tensor' is not for a collate_fn; use transforms='exact'")
        for transforms in split.random_transforms:
            build_tensor_pipeline(transforms)
    deterministic = chain.from_iterable(split.deterministic_transforms)
    exact = _build_from_samples(dataloader, options, split.decoded_probes, split.decode, split.transform, deterministic)
    if not to_tensors:
        return exact
    decoded: Any = exact.dataset
    on_tensors = TensorTransformDataset(decoded, split)
    try:
        check_rounding(split, decoded._samples, on_tensors._samples)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    collate = partial(materialize_or_collate, default_collate)
    return rebuild(exact, ThreadedDataLoader, dataset=on_tensors, collate_fn=collate)


def _build_from_samples(
    dataloader: DataLoader[Any],
    options: StoreOptions,
    examples: Sequence[object],
    decode: Callable[[int], object],
    transform: Transform,
    deterministic: Iterable[Transform],
) -> DataLoader[Any]:
    """Build a replacement that stores single samples, and makes batches with the original's collate function."""
    dataset: Any = dataloader.dataset
    samples = decode_samples(dataloader, decode, examples, options)
    decoded = TransformedDataset(dataset, deterministic, samples, transform)
    replacement = rebuild(dataloader, DecodedDataLoader, dataset=decoded)
    check_same_batches(dataloader, replacement)
    return replacement
