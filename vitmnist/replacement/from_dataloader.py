"""A `DataLoader` over samples that are decoded once, with the batches of the `DataLoader` that it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from vitmnist.data.randomness import (
    RandomSampleError,
    detect_randomness,
    preserved_random_state,
    probe_indices,
    read_probes,
    seed_generators,
)
from vitmnist.errors import ConfigError, DataError, UserError, allowed_names, describe_error
from vitmnist.replacement.decoded_dataset import (
    BatchRows,
    CollateGathered,
    DecodedDataLoader,
    DecodedDataset,
    EagerDataLoader,
    GatheredDataset,
    NoRowsError,
    TransformedDataset,
    collated,
    keep_rows,
    keep_samples,
    read_batch,
)
from vitmnist.replacement.split_transforms import (
    SplitTransforms,
    Transform,
    TransformGuard,
    named_sample,
    transform_parts,
)
from vitmnist.replacement.tensor_transforms import (
    DrawnDataset,
    TensorDataLoader,
    can_be_drawn,
    check_rounding,
    tensor_transforms,
)
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import DoesNotFitError, keep_freed_memory
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.read_once import identity
from vitmnist.store.rows import Location, Storage
from vitmnist.store.tree import copy_tree, find_difference

COMPARED = 3  # So many batches are compared with the original before a replacement is returned.
COMPARED_SIZE = 16  # Larger batches are compared in part, because each of their samples is decoded again.
COMPARED_ALONE = 32  # So many samples are compared as batches of one.
# These samplers draw the indices of an epoch when the first is asked for.
DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
LOADERS = ("auto", "ram", "cache", "gpu_slice")
TRANSFORM_MODES = ("exact", "tensor")


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    device: torch.device | str | None = None,
    folder: str = DEFAULT_FOLDER,
    fingerprint: str | None = None,
    transforms: Literal["exact", "tensor"] = "exact",
) -> DataLoader[Any]:
    """A `DataLoader` with the same batches, in the same order, over samples that are decoded once.

    It is built from the arguments of the original, so Accelerate or Lightning give each rank its part. Its `dataset` is
    a `DecodedDataset`. It has workers only where the order or random transforms depend on them, because gathering a
    batch takes less time than receiving one from a worker. A `DataLoader` that is a replacement already is returned as
    it is.

    If samples are random, the transforms of the dataset are split at the first random one: those before it are
    applied once, the others to each sample in each epoch, in the workers of the original, or with transforms="tensor"
    mostly in threads. The transforms are the attributes `transform` and `transforms` of the dataset, or of those that a
    `Subset` or `ConcatDataset` is made of.

    A sample is random if a random generator is used while it is read, unless it seeds itself; all samples are checked
    while they are decoded. A generator that is made for each sample, such as `default_rng()`, or `secrets` cannot be
    seen. What is changed in the data of the dataset afterwards is not noticed; changed transforms are an error.

    Args:
        loader: where the samples are kept. ram: in memory; cache: in a memory-mapped file; gpu_slice: on the device,
            not for random samples. auto: ram, or cache if they do not fit in memory. If the samples cannot be kept,
            auto warns with the reason, and returns the original; with transforms="tensor", that is an error.
        device: where gpu_slice keeps samples and delivers batches; by default the current CUDA device.
        folder: where cache writes its files.
        fingerprint: names the decoded contents, so that later processes find them in `folder`. Without one, the file is
            for this process only.
        transforms: what the random transforms get. exact: what they got before, such as PIL images; batches are equal
            bit for bit. tensor: uint8 tensors `[C, H, W]`; resizing and colours round differently. If torchvision's
            common transforms are all that is random, they are drawn as before and applied in threads of this process.

    Raises:
        ConfigError: a loader or an option that is unknown or cannot be used; samples that are random apart from their
            transforms; with transforms="tensor", pixels that differ by more than rounding.
        DataError: samples that cannot be read or kept, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    if loader not in LOADERS:
        raise ConfigError(f"loader={loader}: {allowed_names(loader, LOADERS)}")
    if transforms not in TRANSFORM_MODES:
        raise ConfigError(f"transforms={transforms}: {allowed_names(transforms, TRANSFORM_MODES)}")
    if device is not None and loader != "gpu_slice":
        raise ConfigError(f"device={device}: only loader='gpu_slice' delivers batches on a device; leave device out")
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        return dataloader
    target = choose_device("auto" if device is None else str(device))
    if target.type == "cpu":
        keep_freed_memory()

    def replace(name: str) -> DataLoader[Any]:
        location = Location(Storage(name), target, Path(folder).expanduser(), fingerprint)
        return _replace(dataloader, location, to_tensors=transforms == "tensor")

    if loader != "auto":
        return replace(loader)
    try:
        try:
            return replace("ram")
        except DoesNotFitError:
            return replace("cache")
    except UserError as error:
        if transforms == "tensor":
            raise
        warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {error}", stacklevel=2)
        return dataloader


def _replace(dataloader: DataLoader[Any], store: Location, to_tensors: bool) -> DataLoader[Any]:
    """Build the replacement that keeps its samples in `store`; raises as `from_dataloader`.

    A sample that turns out to be random while all are read is added to the probes, and the replacement tried again.

    Args:
        to_tensors: random transforms get tensors.
    """
    check_replaceable(dataloader)
    dataset: Any = dataloader.dataset
    name = store.storage.value
    probes = probe_indices(len(dataset))
    while True:
        try:
            with preserved_random_state(dataset, dataloader.collate_fn):
                return _build(dataloader, store, to_tensors, probes)
        except RandomSampleError as error:
            if error.index in probes:
                raise ConfigError(
                    f"{name}: {error} apart from the transforms in the attributes transform and transforms of "
                    "the dataset (not of its class), or one of these keeps a state from sample to sample; move all "
                    "that is random there, or use the DataLoader as it is"
                ) from error
            probes = [*probes, error.index]
        except ConfigError:
            raise
        except Exception as error:  # Samples and the collate function may fail in any way.
            raise DataError(f"{name}: {describe_error(error)}") from error


def _build(dataloader: DataLoader[Any], store: Location, to_tensors: bool, probes: Sequence[int]) -> DataLoader[Any]:
    """Build a replacement of the kind that fits the samples `probes`; raises `RandomSampleError` for another sample."""
    dataset: Any = dataloader.dataset
    batch_size = min(dataloader.batch_size or COMPARED_SIZE, len(probes))
    samples, batch, reason = _find_random(dataloader, probes, batch_size)
    is_random = reason is not None
    if not is_random:
        try:
            return _build_gathered(dataloader, store, BatchRows.of(batch, batch_size))
        except NoRowsError as error:
            reason = str(error)
    if store.storage is Storage.DEVICE:
        raise ConfigError(f"gpu_slice: {reason}, so batches are made on the host; use ram")
    if not is_random:
        return _build_transformed(dataloader, store, dataset.__getitem__, identity, samples, transform_parts(dataset))
    split = SplitTransforms(dataset, probes)
    once = [part for parts in split.deterministic for part in parts]
    exact = _build_transformed(dataloader, store, split.decode, split.transform, split.probed, once)
    return _with_tensors(exact, split, probes) if to_tensors else exact


def _build_gathered(dataloader: DataLoader[Any], store: Location, first: BatchRows) -> DataLoader[Any]:
    """Build a replacement whose batches are gathered from rows of tensors.

    Args:
        first: a batch of the original.

    Raises:
        NoRowsError: its batches are no such rows.
    """
    dataset: Any = dataloader.dataset
    collate = dataloader.collate_fn
    on_device = store.storage is Storage.DEVICE
    workers = _workers_needed(dataloader)
    if on_device and workers:
        raise NoRowsError("the order of this DataLoader depends on its workers")
    guard = TransformGuard(dataset, [*transform_parts(dataset), collate])
    rows = keep_rows(dataloader, first, store)
    replaced = rebuilt(
        dataloader,
        EagerDataLoader if dataloader.num_workers and not workers else DecodedDataLoader,
        dataset=GatheredDataset(dataset, guard, rows),
        collate_fn=CollateGathered(collate),
        num_workers=workers,
        pin_memory=dataloader.pin_memory and not on_device,
    )
    try:
        _check_same_batches(dataloader, replaced, with_single=True)
    except DataError as error:  # The file of a fingerprint may hold other samples.
        raise error if store.fingerprint else NoRowsError(f"rows depend on the batch: {error}") from error
    guard.ignore_changes()
    return replaced


def _build_transformed(
    dataloader: DataLoader[Any],
    store: Location,
    decode: Callable[[int], object],
    transform: Transform,
    probed: Sequence[object],
    once: Sequence[Transform],
) -> DataLoader[Any]:
    """Build a replacement that keeps single samples, and has the workers of the original.

    Args:
        decode: makes what is kept of a sample, from its index.
        transform: makes the sample of it.
        probed: some decoded samples.
        once: transforms of the dataset that `decode` applies.
    """
    dataset: Any = dataloader.dataset
    guard = TransformGuard(dataset, once)
    samples = keep_samples(dataloader, decode, probed, store)
    decoded = TransformedDataset(dataset, guard, samples, transform)
    replaced = rebuilt(dataloader, DecodedDataLoader, dataset=decoded)
    _check_same_batches(dataloader, replaced)
    guard.ignore_changes()
    return replaced


def _with_tensors(exact: DataLoader[Any], split: SplitTransforms, probes: Sequence[int]) -> DataLoader[Any]:
    """The replacement whose random transforms get tensors; they are drawn in order if their classes allow it.

    Args:
        exact: the replacement whose transforms get what they got before.
        probes: indices of the samples on which the transforms are compared.

    Raises:
        ConfigError: the transforms make something else of tensors.
    """
    dataset: Any = exact.dataset
    samples = dataset._samples.with_tensors()
    try:
        check_rounding(split.random, dataset._samples, samples, probes)
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    transforms = [tensor_transforms(steps) for steps in split.random]
    parts = dataset.original, dataset._guard, samples, partial(split.transform, random=transforms)
    in_workers = rebuilt(exact, TensorDataLoader, dataset=TransformedDataset(*parts))
    # A collate function of the user may draw, or ask for its worker.
    if exact.collate_fn is not default_collate or not all(map(can_be_drawn, chain.from_iterable(transforms))):
        return in_workers
    drawn = DrawnDataset(*parts, transforms=transforms, threads=exact.num_workers)
    in_threads = rebuilt(exact, TensorDataLoader, dataset=drawn, collate_fn=CollateGathered(default_collate))
    try:
        _check_same_batches(in_workers, in_threads)
    except DataError:  # torchvision draws in another way for other objects than pictures.
        return in_workers
    return in_threads


def rebuilt(
    dataloader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, /, **changed: object
) -> DataLoader[Any]:
    """A `DataLoader` with the arguments of another one, some of them changed."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order"]
    if changed.get("num_workers", dataloader.num_workers):
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    # The batch sampler that the DataLoader has made is left out: frameworks build another one around the sampler.
    if dataloader.batch_size is None and dataloader.batch_sampler is not None and "batch_size" not in changed:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "drop_last"]
        names += [] if isinstance(dataloader.dataset, IterableDataset) else ["sampler"]
    return kind(**{name: getattr(dataloader, name) for name in names} | changed)


def check_replaceable(dataloader: object) -> None:
    """Raise `ConfigError` or `DataError` unless this is a `DataLoader` of batches of indexed samples."""
    kind = type(dataloader).__name__
    if not isinstance(dataloader, DataLoader):
        reason = f"must be a torch.utils.data.DataLoader, found {kind}; give the DataLoader that it wraps"
    elif type(dataloader).__iter__ is not DataLoader.__iter__:
        reason = f"{kind} iterates in its own way; give a plain DataLoader, such as the one that a framework wraps"
    elif isinstance(dataloader.dataset, IterableDataset):
        reason = "its dataset is an IterableDataset, whose samples have no index; use the DataLoader as it is"
    elif hasattr(dataloader.dataset, "set_epoch"):
        reason = "its dataset has set_epoch, so its samples change; use the DataLoader as it is"
    elif dataloader.batch_sampler is None:
        reason = "batch_size=None: its dataset makes whole batches, which cannot be divided into samples"
    elif not len(dataloader.dataset):  # type: ignore[arg-type]
        reason = "its dataset is empty"
    else:
        return
    raise ConfigError(f"dataloader: {reason}")


def _workers_needed(dataloader: DataLoader[Any]) -> int:
    """How many workers keep the order of samples: none, if reading batches ahead draws no further random number."""
    sampler, workers = dataloader.sampler, int(dataloader.num_workers)
    if dataloader.batch_size is None or type(sampler) not in DRAW_AT_ONCE:
        return workers
    if isinstance(sampler, RandomSampler) and sampler.generator is not None:
        return workers  # The sampler draws again at the end of an epoch.
    # Persistent workers get their seed once, and a DataLoader without workers draws one in each epoch.
    return workers if dataloader.persistent_workers else 0


def _find_random(
    dataloader: DataLoader[Any], probes: Sequence[int], batch_size: int
) -> tuple[list[Any], object, str | None]:
    """The samples of these indices, a batch of the first of them, and what is random; None if nothing is.

    Raises:
        DataError: a sample that cannot be read, or a collate function that fails for them.
    """
    dataset: Any = dataloader.dataset
    try:
        samples = read_probes(partial(named_sample, dataset.__getitem__), probes, dataset)
    except RandomSampleError as error:
        return [], None, str(error)
    collate = partial(collated, dataloader.collate_fn, indices=probes)
    batch, reason = detect_randomness(
        lambda: collate(copy_tree(samples[:batch_size])), (dataset, collate), always_repeat=True
    )
    return samples, batch, reason and f"the collate function is random ({reason})"


def _check_same_batches(original: DataLoader[Any], replaced: DataLoader[Any], with_single: bool = False) -> None:
    """Compare some batches, bit for bit; raise `DataError` if they differ.

    Args:
        with_single: compare batches of one sample too. Where batches are padded to their longest sample, all larger
            ones may be equally long.
    """
    shuffled = torch.randperm(len(original.dataset), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    size = min(original.batch_size or COMPARED_SIZE, COMPARED_SIZE)
    parts = [part for part in shuffled.split(size)[:COMPARED] if len(part) == size or not original.drop_last]
    if with_single:
        parts += shuffled[:COMPARED_ALONE].split(1)
    for indices in (part.tolist() for part in parts):
        batches = []
        for dataloader in (replaced, original):
            with preserved_random_state(dataloader.dataset, dataloader.collate_fn):
                seed_generators(0, 0, 0)
                batches.append(read_batch(dataloader.dataset, dataloader.collate_fn, indices))
        if difference := find_difference(*batches):
            samples = ", ".join(map(str, indices[:3]))
            raise DataError(
                f"{difference} of samples {samples}, … is not what the DataLoader makes of them: fingerprint= does not "
                "fit, or samples depend on what was read before, or are random without a generator that can be seen "
                "(such as default_rng() in each call); keep no state between samples, move the random step into the "
                "attribute transform of the dataset, or use the DataLoader as it is"
            )
