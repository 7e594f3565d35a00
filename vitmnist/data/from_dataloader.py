"""A `DataLoader` over samples that are decoded once, with the batches of the `DataLoader` that it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from vitmnist.data.dataloaders import check_replaceable, workers_needed
from vitmnist.data.decoded_dataset import DecodedDataset, Store
from vitmnist.data.decoding import find_random
from vitmnist.data.frozen_state import FrozenState, preserved_own_generators
from vitmnist.data.gathering import gathered
from vitmnist.data.loaders.cache import CacheOptions
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.transforming import Form, GivenHalves, transformed
from vitmnist.data.transforms import find_random_transform
from vitmnist.errors import ConfigError, DataError, UserError, allowed_names, described
from vitmnist.runtime.allocator import keep_memory_for
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import DoesNotFitError

STORES = ("gpu_slice", "ram", "cache")
FORMS = ("exact", "tensor")


def from_dataloader(
    dataloader: DataLoader[Any],
    loader: str = "auto",
    *,
    device: torch.device | str | None = None,
    folder: str = CacheOptions.folder,
    fingerprint: str | None = None,
    num_workers: int | None = None,
    transforms: Literal["exact", "tensor"] = "exact",
    tolerance: float = 8.0,
    max_side: int | None = None,
    decode: Callable[[int], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """A `DataLoader` with the same batches, in the same order, over samples that are decoded once.

    It is built from the arguments of the original: its sampler or batch sampler, generator, workers. So everything
    that takes a `DataLoader` takes it, and Accelerate or Lightning give each rank its part. Its `dataset` is a
    `DecodedDataset`. If `dataloader` is such a replacement already, it is returned. As long as it exists, freed memory
    is kept on a machine without CUDA: see `vitmnist.keep_memory`.

    If samples are random, the transforms of the dataset are divided at the first random one: those before it are
    applied once, the others to each sample in each epoch, in the workers of the original. The transforms are the
    attributes `transform` and `transforms` of the dataset, or of those that a `Subset` or `ConcatDataset` is made of.

    Args:
        loader: where the samples are kept. ram: in memory; cache: in a memory-mapped file; gpu_slice: on the device,
            not for random samples. auto: the first that fits of gpu_slice (if `device` is a CUDA device), ram and
            cache. If the samples cannot be kept, auto warns with the reason, and returns the DataLoader that it was
            given; with transforms="tensor", what makes that impossible is an error.
        device: where batches are delivered by gpu_slice (by default the current CUDA device), and by
            transforms="tensor" (by default the host). Otherwise batches are on the host, as those of the original.
        folder: of the files of cache.
        fingerprint: names the decoded contents, so that later processes find them in `folder`; by default that of a
            Hugging Face dataset with torch's own collate function. Without one, the file is for this process only.
        num_workers: of the result, if samples are not random. None: 0, because gathering a batch takes less time than
            receiving one; or those of the original, where its order depends on them: persistent workers, a sampler or
            generator of your own.
        transforms: of random samples. exact: they get what they got before, such as PIL images, and batches are equal
            bit for bit. tensor: they get uint8 tensors `[C, H, W]`, and conversion to float and normalisation at their
            end are applied to whole batches; the same random transforms, but resizing and colours round differently.
        tolerance: by how much pixels may differ with transforms="tensor", of 255.
        max_side: pixels of the longer side of pictures that are kept; larger ones are made smaller before their random
            transforms, so that batches differ from the original's.
        decode: with `transform`, the two steps of a sample for any other dataset: `decode(index)` returns what is kept
            of it, dicts, lists and tuples of pictures, tensors, arrays, numbers and text.
        transform: makes the sample of what is kept of it.

    Raises:
        ConfigError: a loader or an option that is unknown or cannot be used; samples that are random before their
            random transforms; with transforms="tensor", pixels that differ by more than `tolerance`.
        DataError: samples that cannot be read or kept, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    _check_options(loader, device, transforms, decode, transform, max_side)
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        if transforms != "exact" or max_side is not None or decode is not None:
            raise ConfigError("dataloader: is a replacement already; give the original, with these options")
        return dataloader
    try:
        check_replaceable(dataloader)
    except UserError as error:
        if loader != "auto" or not isinstance(dataloader, DataLoader):
            raise
        return _unchanged(dataloader, error)
    target = choose_device("auto" if device is None else str(device))
    given = GivenHalves(decode, transform, len(dataloader.dataset)) if decode and transform else None  # type: ignore[arg-type]
    form = Form(transforms, max_side, tolerance, None if device is None else target)
    with_gpu = device is not None and target.type == "cuda" and not given and transforms == "exact"
    for name in (STORES if with_gpu else STORES[1:]) if loader == "auto" else (loader,):
        store = Store(name, target, Path(folder).expanduser(), fingerprint)
        try:
            return _replaced(dataloader, store, num_workers, form, given)  # type: ignore[no-any-return]
        except UserError as error:
            if loader != "auto" or (transforms != "exact" and not isinstance(error, DoesNotFitError)):
                raise
            reason = error
            if not isinstance(error, DoesNotFitError) and name != "gpu_slice":  # true of the others too
                break
    return _unchanged(dataloader, reason)


def _check_options(
    loader: str, device: object, transforms: str, decode: object, transform: object, max_side: object
) -> None:
    if loader not in (*STORES, "auto"):
        raise ConfigError(f"loader={loader}: {allowed_names(loader, (*STORES, 'auto'))}")
    if transforms not in FORMS:
        raise ConfigError(f"transforms={transforms}: {allowed_names(transforms, FORMS)}")
    if device is not None and loader in ("ram", "cache") and transforms == "exact":
        raise ConfigError(
            f"device={device}: {loader} delivers batches on the host; leave device out, or use gpu_slice or "
            "transforms='tensor'"
        )
    if (decode is None) != (transform is None):
        raise ConfigError("decode= and transform= are the two steps of a sample; give both")
    if decode is not None and (transforms == "tensor" or max_side is not None):
        raise ConfigError("transforms='tensor' and max_side= are for transforms of the dataset; leave decode= out")
    if max_side is not None and (not isinstance(max_side, int) or max_side < 1):
        raise ConfigError(f"max_side={max_side}: must be a whole number of pixels, at least 1")


def _unchanged(dataloader: DataLoader[Any], reason: UserError) -> DataLoader[Any]:
    """Warn with the reason, and return the DataLoader as it is."""
    warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {reason}", stacklevel=3)
    return dataloader


def _replaced(
    dataloader: DataLoader[Any], store: Store, num_workers: int | None, form: Form, given: GivenHalves | None
) -> Any:
    """The replacement that keeps its samples in `store`; raises as `from_dataloader`."""
    dataset: Any = dataloader.dataset
    if hasattr(dataset, "set_epoch"):
        raise ConfigError(f"{store.name}: the dataset has set_epoch: its samples change; use the DataLoader as it is")
    state = FrozenState(dataset, dataloader.collate_fn)
    try:
        with preserved_generators(), preserved_own_generators((dataset, dataloader.collate_fn)):
            random = None if given else find_random_transform(dataset) or find_random(dataset, dataloader.collate_fn)
            if given or random:
                _check_random(store, dataloader, num_workers, random)
                replaced = transformed(dataloader, store, form, given)
            else:
                workers = workers_needed(dataloader) if num_workers is None else num_workers
                replaced = gathered(dataloader, store, workers, state)
    except ConfigError:
        raise
    except Exception as error:  # samples and collate function may fail in any way
        reason = described(error)
        if not isinstance(error, DataError):
            reason += "; raised by the dataset or the collate function, for samples read one after another"
        raise DataError(f"{store.name}: {reason}") from error
    state.ignore_changes()
    if not torch.cuda.is_available():
        keep_memory_for(replaced.dataset)
    return replaced


def _check_random(store: Store, dataloader: DataLoader[Any], num_workers: int | None, random: str | None) -> None:
    """Raise `ConfigError` if random samples cannot be kept in `store`, or would get other random numbers."""
    if store.name == "gpu_slice":
        raise ConfigError(
            f"gpu_slice: {random or 'a sample'} is random, and transforms are applied on the host; use ram"
        )
    if num_workers not in (None, dataloader.num_workers):
        raise ConfigError(
            f"num_workers={num_workers}: {random or 'a sample'} is random, and another number of workers draws other "
            f"random numbers; leave it out, or give the DataLoader itself num_workers={num_workers}"
        )
