"""A `DataLoader` over samples that are decoded once, with the batches of the `DataLoader` that it replaces."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from vitmnist.data.randomness import RandomSampleError, preserved_random_state, probe_indices
from vitmnist.errors import ConfigError, DataError, UserError, allowed_names, described
from vitmnist.replacement.decoded_dataset import (
    CollateGathered,
    DecodedDataLoader,
    DecodedDataset,
    GatheredDataset,
    NoRowsError,
    TransformedDataset,
    collated,
    keep_rows,
    keep_samples,
)
from vitmnist.replacement.original import (
    EagerDataLoader,
    check_replaceable,
    check_rows,
    check_same_batches,
    find_random,
    rebuilt,
    seeded_batch,
    workers_needed,
)
from vitmnist.replacement.split_transforms import (
    NamedSteps,
    Transform,
    TransformGuard,
    TwoStepDataset,
    transform_parts,
)
from vitmnist.replacement.tensor_dataloader import TensorDataLoader
from vitmnist.replacement.tensor_transforms import DrawnDataset, can_be_drawn, picture_difference, tensor_form
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import DoesNotFitError, keep_freed_memory
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.read_once import unchanged
from vitmnist.store.rows import Location
from vitmnist.store.tree import find_difference, flatten

STORES = ("gpu_slice", "ram", "cache")
TRANSFORM_MODES = ("exact", "tensor")
PICTURE_DIMS = 4
"""Dimensions of a batch of pictures, [B, C, H, W]."""
Steps = tuple[Transform, Transform]
"""`decode` and `transform` of the user."""


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    device: torch.device | str | None = None,
    folder: str = DEFAULT_FOLDER,
    fingerprint: str | None = None,
    transforms: Literal["exact", "tensor"] = "exact",
    decode: Callable[[int], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
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
            not for random samples. auto: the first that fits of gpu_slice (if `device` is a CUDA device), ram and
            cache. If the samples cannot be kept, auto warns with the reason, and returns the DataLoader that it was
            given; with transforms="tensor", what makes that impossible is an error.
        device: where batches are delivered by gpu_slice (by default the current CUDA device). Otherwise batches are on
            the host, as those of the original.
        folder: of the files of cache.
        fingerprint: names the decoded contents, so that later processes find them in `folder`; by default that of a
            Hugging Face dataset with torch's own collate function. Without one, the file is for this process only.
        transforms: of random samples. exact: they get what they got before, such as PIL images, and batches are equal
            bit for bit. tensor: they get uint8 tensors `[C, H, W]`; the same random transforms, but resizing and
            colours round differently. If torchvision's common ones are all that is random, they are drawn as before
            and applied in threads of this process.
        decode: with `transform`, the two steps of a sample for any other dataset: `decode(index)` returns what is kept
            of it, dicts, lists and tuples of pictures, tensors, arrays, numbers and text.
        transform: makes the sample from what `decode` returned.

    Raises:
        ConfigError: a loader or an option that is unknown or cannot be used; samples that are random apart from their
            transforms; with transforms="tensor", pixels that differ by more than 8 of 255.
        DataError: samples that cannot be read or kept, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    _check_options(loader, device, transforms, decode, transform)
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        check_replaceable(dataloader)
    target = choose_device("auto" if device is None else str(device))
    if target.type == "cpu":
        keep_freed_memory()
    steps = (decode, transform) if decode and transform else None
    of_tensors = transforms == "tensor"
    with_gpu = device is not None and target.type == "cuda" and not steps
    stores = (STORES if with_gpu else STORES[1:]) if loader == "auto" else (loader,)
    for name in stores:
        try:
            store = Location(name, target, Path(folder).expanduser(), fingerprint)
            return _replaced(dataloader, store, steps, of_tensors)
        except UserError as error:
            reason = error
            if loader != "auto" or (of_tensors and name != "gpu_slice" and not isinstance(error, DoesNotFitError)):
                raise
            if not isinstance(error, DoesNotFitError) and name != "gpu_slice":  # true of the others too
                break
    warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {reason}", stacklevel=2)
    return dataloader


def _check_options(loader: str, device: object, transforms: str, decode: object, transform: object) -> None:
    if loader not in (*STORES, "auto"):
        raise ConfigError(f"loader={loader}: {allowed_names(loader, (*STORES, 'auto'))}")
    if transforms not in TRANSFORM_MODES:
        raise ConfigError(f"transforms={transforms}: {allowed_names(transforms, TRANSFORM_MODES)}")
    if device is not None and loader in ("ram", "cache"):
        raise ConfigError(f"device={device}: {loader} delivers batches on the host; leave device out, or use gpu_slice")
    if (decode is None) != (transform is None):
        raise ConfigError("decode= and transform= are the two steps of a sample; give both")
    if decode is not None and transforms == "tensor":
        raise ConfigError("transforms='tensor' is for transforms of the dataset; leave decode= and transform= out")


def _replaced(dataloader: DataLoader[Any], store: Location, steps: Steps | None, of_tensors: bool) -> DataLoader[Any]:
    """The replacement that keeps its samples in `store`; raises as `from_dataloader`.

    A sample that turns out to be random while all are read is one more on which the replacement is tried.

    Args:
        steps: `decode` and `transform` of the user.
        of_tensors: transforms="tensor".
    """
    check_replaceable(dataloader)
    probes = probe_indices(len(dataloader.dataset))  # type: ignore[arg-type]
    while True:
        try:
            with preserved_random_state(dataloader.dataset, dataloader.collate_fn):
                return _decoded(dataloader, store, steps, of_tensors, probes)
        except RandomSampleError as error:
            if error.index in probes:
                raise ConfigError(
                    f"{store.loader}: {error} apart from the transforms in the attributes transform and transforms of "
                    "the dataset (not of its class), or one of these keeps a state from sample to sample; move all "
                    "that is random there, name the two steps with decode= and transform=, or use the DataLoader as "
                    "it is"
                ) from error
            probes = [*probes, error.index]
        except ConfigError:
            raise
        except Exception as error:  # samples and collate function may fail in any way
            raise DataError(f"{store.loader}: {described(error)}") from error


def _decoded(
    dataloader: DataLoader[Any], store: Location, steps: Steps | None, of_tensors: bool, probes: list[int]
) -> DataLoader[Any]:
    """The replacement, of the kind that `probes` show to be possible; raises `RandomSampleError` for another sample."""
    dataset: Any = dataloader.dataset
    samples, random = ([], "decode= makes samples random") if steps else find_random(dataloader, probes)
    if random and store.loader == "gpu_slice":
        raise ConfigError(f"gpu_slice: {random}, and transformed on the host; use ram")
    if steps:
        return _replace_random(dataloader, store, NamedSteps(*steps, dataset, probes), probes)
    if random:
        return _replace_random(dataloader, store, TwoStepDataset(dataset, probes), probes, of_tensors)
    try:
        return _replace_fixed(dataloader, store, samples)
    except NoRowsError as error:
        if store.loader == "gpu_slice":
            raise ConfigError(f"gpu_slice: {error}; ram keeps such samples, and collates them") from error
    source = NamedSteps(dataset.__getitem__, unchanged, dataset, probes, samples)
    return _replace_random(dataloader, store, source, probes)


def _replace_fixed(dataloader: DataLoader[Any], store: Location, probed: list[Any]) -> DataLoader[Any]:
    """The replacement whose batches are gathered from rows of tensors; raises as `from_dataloader`, and `NoRowsError`.

    Args:
        probed: samples on which the collate function is tried.
    """
    dataset: Any = dataloader.dataset
    collate, on_device, workers = dataloader.collate_fn, store.loader == "gpu_slice", workers_needed(dataloader)
    if on_device and workers:
        raise ConfigError(
            "gpu_slice: the order of this DataLoader depends on its workers, which cannot deliver from the device; "
            "give it num_workers=0"
        )
    first = check_rows(partial(collated, collate, "probes"), probed)
    guard = TransformGuard(dataset, [*transform_parts(dataset), collate])
    fingerprint = store.fingerprint
    if default_collate is collate:
        fingerprint = fingerprint or getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset
    batches = keep_rows(dataloader, first, store, fingerprint)
    replaced = rebuilt(
        dataloader,
        EagerDataLoader if dataloader.num_workers and not workers else DecodedDataLoader,
        dataset=GatheredDataset(dataset, guard, batches),
        collate_fn=CollateGathered(collate),
        num_workers=workers,
        pin_memory=dataloader.pin_memory and not on_device,
    )
    check_same_batches(
        dataloader, replaced, is_random=False, options=(fingerprint and "the samples of this fingerprint=") or ""
    )
    guard.ignore_changes()
    return replaced


def _replace_random(
    dataloader: DataLoader[Any],
    store: Location,
    source: TwoStepDataset | NamedSteps,
    probes: list[int],
    of_tensors: bool = False,
) -> DataLoader[Any]:
    """The replacement that keeps single samples and has the workers of the original; raises as `from_dataloader`.

    Args:
        probes: indices of the samples `source.probed`.
        of_tensors: random transforms get tensors.
    """
    dataset: Any = dataloader.dataset
    deterministic = [part for parts in source.deterministic for part in parts]
    keeps_results = isinstance(source, NamedSteps) and source.transform is unchanged
    guard = TransformGuard(dataset, transform_parts(dataset) if keeps_results else deterministic)
    once = re.sub(" at 0x[0-9a-f]+", "", str(source.deterministic))  # addresses vary
    store = replace(store, fingerprint=store.fingerprint and f"{store.fingerprint}, {once}")
    samples = keep_samples(source, source.probed, dataloader, store)
    exact = TransformedDataset(dataset, guard, samples, source.transform)
    replaced = rebuilt(dataloader, DecodedDataLoader, dataset=exact)
    options = ["decode= and transform="] if isinstance(source, NamedSteps) and not keeps_results else []
    options += ["the samples of this fingerprint="] if store.fingerprint else []
    check_same_batches(dataloader, replaced, is_random=True, options=" or ".join(options))
    guard.ignore_changes()
    return _of_tensors(replaced, source, probes) if of_tensors and isinstance(source, TwoStepDataset) else replaced


def _of_tensors(exact: DataLoader[Any], source: TwoStepDataset, probes: list[int]) -> DataLoader[Any]:
    """The replacement whose random transforms get tensors, and are drawn in order if they are known.

    Args:
        exact: the replacement whose transforms get what they got before.

    Raises:
        ConfigError: the transforms, or the collate function, make something else of tensors.
    """
    dataset: Any = exact.dataset
    collate = exact.collate_fn
    forms = [tensor_form(transforms) for transforms in source.random]
    transforms = [steps for steps, _ in forms]
    kept = dataset.original, dataset._guard, dataset._samples.with_tensors()
    unconverted: list[Any] = []
    join: Any = partial(sum, start=[])  # the results of all calls of the samples
    try:
        for samples, steps in ((kept[2], transforms), (dataset._samples, source.random)):
            before = partial(source.results, [part[:end] for part, (_, end) in zip(steps, forms, strict=True)])
            unconverted.append(seeded_batch(TransformedDataset(*kept[:2], samples, before), join, probes))
    except DataError as error:
        raise ConfigError(f"transforms='tensor': {error}; use transforms='exact'") from error
    mean, largest = picture_difference(*unconverted)
    if largest:
        warnings.warn(
            f"transforms='tensor': the same random transforms, with pixels that differ by {mean:.2g} of 255 on "
            f"average, at most by {largest:.3g}",
            stacklevel=7,
        )
    make = partial(source.transform, random=transforms)
    in_workers = TransformedDataset(*kept, make)
    try:
        pairs = [flatten(seeded_batch(part, collate, probes[:2]))[0] for part in (in_workers, dataset)]
    except Exception as error:  # a transform after the conversion, or the collate function
        raise ConfigError(f"transforms='tensor': {described(error)}; use transforms='exact'") from error
    for leaf, expected in zip(*pairs, strict=True):
        if isinstance(expected, Tensor) and (leaf.dtype, leaf.shape) != (expected.dtype, expected.shape):
            raise ConfigError(
                f"transforms='tensor': the batch has {leaf.dtype} {list(leaf.shape)} where that of PIL images has "
                f"{expected.dtype} {list(expected.shape)}; use transforms='exact'"
            )
    # A collate function of the user may draw, or ask for its worker.
    if collate is default_collate and all(can_be_drawn(part) for steps in transforms for part in steps):
        dtypes = [leaf.dtype for leaf in pairs[1] if isinstance(leaf, Tensor) and leaf.dim() == PICTURE_DIMS]
        dtype = dtypes[0] if dtypes else torch.get_default_dtype()
        drawn = DrawnDataset(*kept, make, transforms=transforms, dtype=dtype, threads=exact.num_workers)
        if _are_same(in_workers, drawn, probes):
            return rebuilt(exact, TensorDataLoader, dataset=drawn, collate_fn=CollateGathered(collate))
    return rebuilt(exact, TensorDataLoader, dataset=in_workers)


def _are_same(in_workers: TransformedDataset, drawn: DrawnDataset, probes: Sequence[int]) -> bool:
    """Whether two forms of a dataset draw the same and make the same batches of it, bit for bit."""

    def collate(samples: Any) -> object:
        return CollateGathered(default_collate)(samples), torch.get_rng_state()

    with suppress(Exception):  # torchvision may not draw for what is no picture
        batches = [*([index] for index in probes), probes]
        pairs = [[seeded_batch(dataset, collate, batch) for dataset in (in_workers, drawn)] for batch in batches]
        return not any(find_difference(*pair) for pair in pairs)
    return False
