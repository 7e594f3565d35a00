"""Replaces a `DataLoader` by a `DataLoader` with the same batches that decodes each sample only once.

A replacement has one of three forms, the fastest that fits:

1. Rows: a batch is gathered from rows of tensors. No sample is random, and each tensor of a batch has a row per sample.
2. Samples: a batch is collated from stored samples by the original's function. No sample is random.
3. Split samples: samples are stored before their first random transform. The others are applied in each epoch.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate

from vitmnist.data.random_samples import RandomSampleError, call_and_check_random, choose_probes, read_probes
from vitmnist.errors import ConfigError, DataError, UserError, format_error, suggest_names
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, DecodedDataset, materialize_or_collate
from vitmnist.replacement.original_dataloader import (
    COMPARED_SIZE,
    check_replaceable,
    check_same_batches,
    collate_batch,
    fetch_sample,
    order_depends_on_workers,
    rebuild,
)
from vitmnist.replacement.row_dataset import RowDataset, RowTensors, decode_rows
from vitmnist.replacement.sample_dataset import SampleDataset, decode_samples
from vitmnist.replacement.split_transforms import SplitTransforms
from vitmnist.replacement.tensor_dataset import TensorTransformDataset, ThreadedDataLoader, check_rounding
from vitmnist.replacement.tensor_transforms import build_tensor_pipeline
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import OutOfSpaceError, keep_freed_memory
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import StoreOptions
from vitmnist.store.tree import copy_tree


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
    choices = {"loader": (loader, ("auto", "ram", "cache")), "transforms": (transforms, ("exact", "tensor"))}
    for argument, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{argument}={value}: {suggest_names(value, allowed)}")
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
            replacement = _build(dataloader, options, to_tensors)
    except RandomSampleError as error:
        raise ConfigError(
            f"{name}: {error} apart from the transforms in the attributes transform and transforms of the dataset (not "
            "of its class), or it keeps a state from sample to sample; move all random steps there, or use the "
            "DataLoader as it is"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # The dataset and the collate function can raise any error.
        raise DataError(f"{name}: {format_error(error)}") from error
    decoded: Any = replacement.dataset
    decoded.transform_guard.start(dataloader.collate_fn)
    return replacement


def _build(dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool) -> DataLoader[Any]:
    """Build the form of replacement that fits some samples, the probes.

    Only decoding all samples shows whether the others are like the probes. A random sample that it reveals becomes
    another probe.

    Raises:
        RandomSampleError: a sample is random apart from its transforms.
    """
    probes = choose_probes(len(dataloader.dataset))  # type: ignore[arg-type]
    while isinstance(result := _build_for_probes(dataloader, options, to_tensors, probes), RandomSampleError):
        if result.index in probes:
            raise result
        probes = sorted({*probes, result.index})
    return result


def _build_for_probes(
    dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool, probes: Sequence[int]
) -> DataLoader[Any] | RandomSampleError:
    """Build the form that fits the probes. Returns an error if decoding reveals a random sample that does not fit."""
    dataset: Any = dataloader.dataset
    try:
        samples, random_sample = read_probes(partial(fetch_sample, dataset.__getitem__), probes, dataset)
        if random_sample:
            return _build_from_split_samples(dataloader, options, SplitTransforms(dataset, probes), to_tensors)
        replacement = _build_from_rows(dataloader, options, probes, samples)
        return _build_from_samples(dataloader, options, samples) if replacement is None else replacement
    except RandomSampleError as error:
        return error


def _build_from_rows(
    dataloader: DataLoader[Any], options: StoreOptions, probes: Sequence[int], samples: Sequence[Any]
) -> DataLoader[Any] | None:
    """Build a replacement that gathers batches from rows of tensors. Returns None if a batch has no row per sample.

    Args:
        samples: the samples with the indices `probes`.
    """
    size = min(dataloader.batch_size or COMPARED_SIZE, len(samples))

    def collate() -> object:
        return collate_batch(dataloader.collate_fn, copy_tree(list(samples[:size])), probes)

    batch, reason = call_and_check_random(collate, (dataloader.dataset, dataloader.collate_fn), always_repeat=True)
    example = None if reason else RowTensors.from_batch(batch, size)
    rows = example and decode_rows(dataloader, example, options)
    if not rows:
        return None
    keeps_workers = order_depends_on_workers(dataloader)
    draws_early = dataloader.num_workers > 0 and not keeps_workers
    replacement = rebuild(
        dataloader,
        DecodedDataLoader,
        dataset=RowDataset(dataloader.dataset, rows, draws_early),  # type: ignore[arg-type]
        collate_fn=partial(materialize_or_collate, dataloader.collate_fn),
        num_workers=dataloader.num_workers if keeps_workers else 0,
    )
    try:
        check_same_batches(dataloader, replacement, with_single_samples=True)
    except DataError:
        if options.fingerprint:  # The file of a fingerprint can hold other samples.
            raise
        return None
    return replacement


def _build_from_samples(
    dataloader: DataLoader[Any], options: StoreOptions, examples: Sequence[object], split: SplitTransforms | None = None
) -> DataLoader[Any]:
    """Build a replacement that stores single samples, and makes batches with the original's collate function.

    Args:
        examples: some decoded samples.
        split: has the random transforms to apply in each epoch. None: no sample is random.
    """
    dataset: Any = dataloader.dataset
    samples = decode_samples(dataloader, split.decode if split else dataset.__getitem__, examples, options)
    replacement = rebuild(dataloader, DecodedDataLoader, dataset=SampleDataset(dataset, samples, split))
    check_same_batches(dataloader, replacement)
    return replacement


def _build_from_split_samples(
    dataloader: DataLoader[Any], options: StoreOptions, split: SplitTransforms, to_tensors: bool
) -> DataLoader[Any]:
    """Build a replacement that applies random transforms in workers, or to tensors in threads.

    Raises:
        ConfigError: the transforms cannot be applied to tensors, or the pixels differ by more than rounding.
    """
    if to_tensors:
        if dataloader.collate_fn is not default_collate:
            raise ConfigError("transforms='tensor' is not for a collate_fn; use transforms='exact'")
        for transforms in split.random_transforms:
            build_tensor_pipeline(transforms)
    exact = _build_from_samples(dataloader, options, split.decoded_probes, split)
    if not to_tensors:
        return exact
    decoded: Any = exact.dataset
    on_tensors = TensorTransformDataset(decoded, split)
    try:
        check_rounding(split, decoded.encoded_samples, on_tensors.encoded_samples)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    collate = partial(materialize_or_collate, default_collate)
    return rebuild(exact, ThreadedDataLoader, dataset=on_tensors, collate_fn=collate)
