"""Replaces a `DataLoader` by one that has the same batches but decodes each sample only once."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, default_collate

from vitmnist.data.randomness import (
    RandomSampleError,
    call_and_check_random,
    choose_probes,
    preserved_random_state,
    read_probes,
)
from vitmnist.errors import ConfigError, DataError, UserError, format_error, suggest_names
from vitmnist.replacement.decoded_dataset import (
    DecodedDataLoader,
    DecodedDataset,
    EagerDataLoader,
    RowDataset,
    RowTensors,
    TransformedDataset,
    decode_rows,
    decode_samples,
    materialize_or_collate,
)
from vitmnist.replacement.original import (
    COMPARED_SIZE,
    NotRowsError,
    check_replaceable,
    check_same_batches,
    collate_batch,
    count_order_workers,
    fetch_sample,
    rebuild,
)
from vitmnist.replacement.split_transforms import SplitTransforms, Transform, TransformGuard, list_transforms
from vitmnist.replacement.tensor_dataset import TensorTransformDataset, ThreadedDataLoader, check_rounding
from vitmnist.replacement.tensor_transforms import build_tensor_pipeline
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import OutOfSpaceError, keep_freed_memory
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.read_once import identity
from vitmnist.store.rows import Destination, Placement
from vitmnist.store.tree import copy_tree

PLACEMENTS = {"ram": Placement.HOST, "cache": Placement.FILE, "gpu_slice": Placement.DEVICE}
"""Where each value of the argument `loader` keeps the samples."""
LOADER_NAMES = {placement: name for name, placement in PLACEMENTS.items()}
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
    takes less time than receiving one from a worker. A replacement is returned unchanged.

    If samples are random, the transforms of the dataset are split at the first random one. Those before it are applied
    once. The others are applied in each epoch, in the workers of the original or, with transforms="tensor", in threads.
    The transforms are the attributes `transform` and `transforms` of the dataset, or of the datasets in a `Subset` or
    `ConcatDataset`.

    A sample is random if reading it uses a random generator, unless the sample seeds the generator. All samples are
    checked while they are decoded. The module `secrets` and generators that are created for each sample, such as
    `default_rng()`, are not detected. Later changes of the transforms are an error. Later changes of the data are not
    detected.

    Args:
        loader: where the samples are kept. ram: in memory. cache: in a memory-mapped file. gpu_slice: on the current
            CUDA device; not for random samples. auto: ram, or cache if they do not fit in memory. If the samples cannot
            be kept, auto warns and returns the original. With transforms="tensor", it raises an error instead.
        folder: where cache writes its files.
        fingerprint: names the decoded contents, so that later processes find them in `folder`. Without a name, only
            this process uses the file.
        transforms: the inputs of the random transforms. exact: the same as before, such as PIL images. Batches are
            equal bit for bit. tensor: uint8 tensors `[C, H, W]`, for torchvision's common transforms. The same
            parameters are drawn, but resizing and colours round differently.

    Raises:
        ConfigError: an argument is unknown or cannot be used, or samples are random apart from their transforms. With
            transforms="tensor", a transform is not supported, or pixels differ by more than rounding.
        DataError: samples cannot be read or kept, or batches differ from the original's.
        OutOfSpaceError: memory or the disk of `folder` is too small.
    """
    if loader not in ("auto", *PLACEMENTS):
        raise ConfigError(f"loader={loader}: {suggest_names(loader, ('auto', *PLACEMENTS))}")
    if transforms not in TRANSFORM_MODES:
        raise ConfigError(f"transforms={transforms}: {suggest_names(transforms, TRANSFORM_MODES)}")
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        return dataloader
    device = choose_device("auto")
    if device.type == "cpu":
        keep_freed_memory()
    locate = partial(Destination, device=device, folder=Path(folder).expanduser(), fingerprint=fingerprint)
    to_tensors = transforms == "tensor"
    if loader != "auto":
        return _replace(dataloader, locate(PLACEMENTS[loader]), to_tensors)
    try:
        try:
            return _replace(dataloader, locate(Placement.HOST), to_tensors)
        except OutOfSpaceError:
            return _replace(dataloader, locate(Placement.FILE), to_tensors)
    except UserError as error:
        if to_tensors:
            raise
        warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {error}", stacklevel=2)
        return dataloader


class Plan(NamedTuple):
    """What to keep of the samples of a `DataLoader`.

    Args:
        probes: indices of the samples that were read to make the plan.
        samples: the samples of these indices. None: some samples are random, so keep each in the state before its first
            random transform.
        example: a batch of the first samples. None: keep samples one by one. Otherwise, keep them as rows of tensors.
        reason: why samples are not kept as rows; empty if they are.
    """

    probes: list[int]
    samples: list[Any] | None
    example: RowTensors | None
    reason: str = ""


def _replace(dataloader: DataLoader[Any], target: Destination, to_tensors: bool) -> DataLoader[Any]:
    """Build a replacement that keeps its samples in `target`. Raises the errors of `from_dataloader`."""
    check_replaceable(dataloader)
    try:
        with preserved_random_state(dataloader.dataset, dataloader.collate_fn):
            plan = _make_plan(dataloader)
        return _build(dataloader, target, to_tensors, plan)
    except ConfigError:
        raise
    except Exception as error:  # Samples and the collate function may raise anything.
        raise DataError(f"{LOADER_NAMES[target.placement]}: {format_error(error)}") from error


def _make_plan(dataloader: DataLoader[Any]) -> Plan:
    """Read a few samples, the probes, and choose how to keep all samples."""
    dataset: Any = dataloader.dataset
    probes = choose_probes(len(dataset))
    try:
        samples = read_probes(partial(fetch_sample, dataset.__getitem__), probes, dataset)
    except RandomSampleError as error:
        return Plan(probes, None, None, str(error))
    first = samples[: dataloader.batch_size or COMPARED_SIZE]
    collate = partial(collate_batch, dataloader.collate_fn, indices=probes)
    batch, reason = call_and_check_random(lambda: collate(copy_tree(first)), (dataset, collate), always_repeat=True)
    if reason:
        return Plan(probes, samples, None, f"the collate function is random ({reason})")
    try:
        return Plan(probes, samples, RowTensors.from_batch(batch, len(first)))
    except NotRowsError as error:
        return Plan(probes, samples, None, str(error))


def _build(dataloader: DataLoader[Any], target: Destination, to_tensors: bool, plan: Plan) -> DataLoader[Any]:
    """Build the replacement of a plan. If a sample that is no probe does not fit the plan, change the plan."""
    dataset: Any = dataloader.dataset
    if target.placement is Placement.DEVICE and plan.reason:
        raise ConfigError(f"gpu_slice: {plan.reason}, so batches are made on the host; use ram")
    try:
        with preserved_random_state(dataset, dataloader.collate_fn):
            if plan.samples is None:
                build = _build_with_tensors if to_tensors else _build_transformed
                return build(dataloader, target, SplitTransforms(dataset, plan.probes))
            if plan.example is None:
                transforms = list_transforms(dataset)
                return _build_per_sample(dataloader, target, plan.samples, dataset.__getitem__, identity, transforms)
            return _build_gathered(dataloader, target, plan.example)
    except NotRowsError as error:
        if plan.example is None:
            raise
        changed = plan._replace(example=None, reason=str(error))
    except RandomSampleError as error:
        if error.index in plan.probes:
            raise ConfigError(
                f"{LOADER_NAMES[target.placement]}: {error} apart from the transforms in the attributes transform and "
                "transforms of the dataset (not of its class), or one of these keeps a state from sample to sample; "
                "move all that is random there, or use the DataLoader as it is"
            ) from error
        changed = Plan([*plan.probes, error.index], None, None, str(error))
    return _build(dataloader, target, to_tensors, changed)


def _build_gathered(dataloader: DataLoader[Any], target: Destination, example: RowTensors) -> DataLoader[Any]:
    """Build a replacement that gathers batches from rows of tensors.

    Args:
        example: a batch of the original.

    Raises:
        NotRowsError: a batch cannot be gathered from rows.
    """
    dataset: Any = dataloader.dataset
    on_device = target.placement is Placement.DEVICE
    workers = count_order_workers(dataloader)
    if on_device and workers:
        raise ConfigError("gpu_slice: the order of this DataLoader depends on its workers; use ram")
    guard = TransformGuard(dataset, [*list_transforms(dataset), dataloader.collate_fn])
    rows = decode_rows(dataloader, example, target)
    replacement = rebuild(
        dataloader,
        EagerDataLoader if dataloader.num_workers and not workers else DecodedDataLoader,
        dataset=RowDataset(dataset, guard, rows),
        collate_fn=partial(materialize_or_collate, dataloader.collate_fn),
        num_workers=workers,
        pin_memory=dataloader.pin_memory and not on_device,
    )
    try:
        check_same_batches(dataloader, replacement, with_single_samples=True)
    except DataError as error:  # The file of a fingerprint may hold other samples.
        raise error if target.fingerprint else NotRowsError(f"rows depend on the batch: {error}") from error
    guard.ignore_changes()
    return replacement


def _build_transformed(dataloader: DataLoader[Any], target: Destination, split: SplitTransforms) -> DataLoader[Any]:
    """Build a replacement that applies random transforms in the workers of the original."""
    decode, transform, deterministic = split.decode, split.transform, chain.from_iterable(split.deterministic)
    return _build_per_sample(dataloader, target, split.decoded_probes, decode, transform, deterministic)


def _build_per_sample(
    dataloader: DataLoader[Any],
    target: Destination,
    examples: Sequence[object],
    decode: Callable[[int], object],
    transform: Transform,
    deterministic: Iterable[Transform],
) -> DataLoader[Any]:
    """Build a replacement that keeps samples one by one, and makes batches with the original's collate function."""
    dataset: Any = dataloader.dataset
    guard = TransformGuard(dataset, deterministic)
    samples = decode_samples(dataloader, decode, examples, target)
    replacement = rebuild(dataloader, DecodedDataLoader, dataset=TransformedDataset(dataset, guard, samples, transform))
    check_same_batches(dataloader, replacement)
    guard.ignore_changes()
    return replacement


def _build_with_tensors(dataloader: DataLoader[Any], target: Destination, split: SplitTransforms) -> DataLoader[Any]:
    """Build a replacement that applies random transforms to tensors, in threads.

    Raises:
        ConfigError: the transforms cannot be applied to tensors, or the pixels differ by more than rounding.
    """
    if dataloader.collate_fn is not default_collate:
        raise ConfigError("transforms='tensor' is not for a collate_fn; use transforms='exact'")
    for transforms in split.random:
        build_tensor_pipeline(transforms)
    exact: Any = _build_transformed(dataloader, target, split).dataset
    on_tensors = TensorTransformDataset(exact, split.random)
    try:
        check_rounding(split, exact._samples, on_tensors._samples)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    collate = partial(materialize_or_collate, default_collate)
    return rebuild(dataloader, ThreadedDataLoader, dataset=on_tensors, collate_fn=collate)
