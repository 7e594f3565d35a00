"""A `DataLoader` over samples that are decoded once, with the batches of the `DataLoader` that it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler

from vitmnist.data.collate import unchanged
from vitmnist.data.decoding import find_random
from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import ConfigError, DataError, UserError, allowed_names, described
from vitmnist.replacement.batch_rows import NoRowsError
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.fixed_samples import gathered
from vitmnist.replacement.frozen_state import FrozenState, preserved_own_generators
from vitmnist.replacement.halves import find_random_transform
from vitmnist.replacement.keep_decoded import Location
from vitmnist.replacement.original import COMPARED_SIZE, NamedCollate, check_replaceable, rebuilt
from vitmnist.replacement.random_samples import GivenHalves, transformed
from vitmnist.replacement.tensor_dataloader import TensorDataLoader
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import DoesNotFitError, keep_memory_for
from vitmnist.store.cache_file import DEFAULT_FOLDER

STORES = ("gpu_slice", "ram", "cache")
FORMS = ("exact", "tensor")


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
    batch takes less time than receiving one from a worker. As long as it exists, freed memory is kept on a machine
    without CUDA: see `vitmnist.keep_memory`. A `DataLoader` that is a replacement already is returned as it is.

    If samples are random, the transforms of the dataset are divided at the first random one: those before it are
    applied once, the others to each sample in each epoch, in the workers of the original, or with transforms="tensor"
    mostly in threads. The transforms are the attributes `transform` and `transforms` of the dataset, or of those that a
    `Subset` or `ConcatDataset` is made of.

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
        transforms: of random samples. exact: they get what they got before, such as PIL images, and batches are equal
            bit for bit. tensor: they get uint8 tensors `[C, H, W]`; the same random transforms, but resizing and
            colours round differently. If torchvision's common ones are all that is random, they are drawn as before
            and applied in threads of this process; with others, whole batches are converted and normalised.
        decode: with `transform`, the two steps of a sample for any other dataset: `decode(index)` returns what is kept
            of it, dicts, lists and tuples of pictures, tensors, arrays, numbers and text.
        transform: makes the sample from what `decode` returned.

    Raises:
        ConfigError: a loader or an option that is unknown or cannot be used; samples that are random before their
            random transforms; with transforms="tensor", pixels that differ by more than 8 of 255.
        DataError: samples that cannot be read or kept, or batches that would differ from the original's.
        DoesNotFitError: memory, or the disk of `folder`, is too small.
    """
    _check_options(loader, device, transforms, decode, transform)
    if isinstance(getattr(dataloader, "dataset", None), DecodedDataset):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        check_replaceable(dataloader)
    target = choose_device("auto" if device is None else str(device))
    given = GivenHalves(decode, transform, dataloader.dataset) if decode and transform else None
    of_tensors, delivers = transforms == "tensor", device is not None
    with_gpu = delivers and target.type == "cuda" and not given and not of_tensors
    stores = (STORES if with_gpu else STORES[1:]) if loader == "auto" else (loader,)
    for name in stores:
        try:
            store = Location(name, target, Path(folder).expanduser(), fingerprint)
            return _replaced(dataloader, store, given, of_tensors, delivers)
        except UserError as error:
            reason = error
            if loader != "auto" or (of_tensors and not isinstance(error, DoesNotFitError)):
                raise
            if not isinstance(error, DoesNotFitError) and name != "gpu_slice":  # true of the others too
                break
    warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {reason}", stacklevel=2)
    return dataloader


def _check_options(loader: str, device: object, transforms: str, decode: object, transform: object) -> None:
    if loader not in (*STORES, "auto"):
        raise ConfigError(f"loader={loader}: {allowed_names(loader, (*STORES, 'auto'))}")
    if transforms not in FORMS:
        raise ConfigError(f"transforms={transforms}: {allowed_names(transforms, FORMS)}")
    if device is not None and loader in ("ram", "cache") and transforms == "exact":
        raise ConfigError(f"device={device}: {loader} delivers batches on the host; leave device out, or use gpu_slice")
    if (decode is None) != (transform is None):
        raise ConfigError("decode= and transform= are the two steps of a sample; give both")
    if decode is not None and transforms == "tensor":
        raise ConfigError("transforms='tensor' is for transforms of the dataset; leave decode= and transform= out")


def _replaced(
    dataloader: DataLoader[Any], store: Location, given: GivenHalves | None, of_tensors: bool, delivers: bool
) -> DataLoader[Any]:
    """The replacement that keeps its samples in `store`; raises as `from_dataloader`.

    Args:
        of_tensors: transforms="tensor".
        delivers: move batches of such samples to the device.
    """
    check_replaceable(dataloader)
    dataset: Any = dataloader.dataset
    if hasattr(dataset, "set_epoch"):
        raise ConfigError("dataloader: its dataset has set_epoch: its samples change; use the DataLoader as it is")
    with suppress(TypeError):  # a sampler without a length
        used, size = len(dataloader.sampler), len(dataset)  # type: ignore[arg-type]
        if used < size / 2 and not isinstance(dataloader.sampler, DistributedSampler):
            warnings.warn(
                f"from_dataloader decodes all {size} samples of the dataset, of which the sampler gives {used} in an "
                "epoch; if these are always the same, use a Subset of them",
                stacklevel=3,
            )
    state = FrozenState(dataset, dataloader.collate_fn)
    try:
        with preserved_generators(), preserved_own_generators((dataset, dataloader.collate_fn)):
            whole = GivenHalves(dataset.__getitem__, unchanged, dataset)
            random = None if given else find_random_transform(dataset) or _find_random(dataloader, whole)
            state.ignore_changes()
            if (given or random) and store.loader == "gpu_slice":
                raise ConfigError(f"gpu_slice: {random or 'a sample'} is random, and transformed on the host; use ram")
            replaced = None
            if not (given or random):
                try:
                    replaced = gathered(dataloader, store, state)
                except NoRowsError as error:
                    if store.loader == "gpu_slice":
                        raise ConfigError(f"gpu_slice: {error}; ram keeps such samples, and collates them") from error
                    given = whole
            if replaced is None:  # its truth is its length
                replaced = transformed(dataloader, store, state, of_tensors, given)
                if of_tensors and delivers:
                    replaced = rebuilt(replaced, TensorDataLoader, pin_memory=store.device.type == "cuda")
                    replaced.device = store.device
    except ConfigError:
        raise
    except Exception as error:  # samples and collate function may fail in any way
        raise DataError(f"{store.loader}: {described(error)}") from error
    state.ignore_changes()
    if not torch.cuda.is_available():
        keep_memory_for(replaced.dataset)
    return replaced  # type: ignore[no-any-return]


def _find_random(dataloader: DataLoader[Any], whole: GivenHalves) -> str | None:
    """`find_random` of a dataset; raises `DataError` if the collate function fails for a batch of the usual size."""
    size = min(dataloader.batch_size or COMPARED_SIZE, COMPARED_SIZE, len(whole))
    samples = [whole[index] for index in range(size)]
    NamedCollate(dataloader.collate_fn, f"samples 0 to {size - 1}")(samples)

    def collate(samples: list[Any]) -> Any:
        try:
            return dataloader.collate_fn(samples)
        except Exception:  # it may need a second sample, or one that is not None
            return samples

    return find_random(whole, collate)
