"""Replaces a `DataLoader` by a `DataLoader` with the same batches that decodes each sample only once.

The invariant: a loop reads the same from the replacement as from the original, bit for bit, and leaves random
generators in the same states. It holds for these reasons:

- Order: the replacement is a `DataLoader` with the arguments of the original (`rebuild`), so torch draws the order.
- Samples: only what is the same in each read is stored. `vitmnist.data.random_samples` alone decides that, for samples,
  transforms and collate functions. The first random transform and all that follow it run in each epoch.
- Checks: batches of both are compared before the replacement is returned (`check_same_batches`), and a later change of
  the transforms is an error (`ChangeGuard`).

`_build` chooses one of three forms, each in its module. Read them after `original_dataloader` and `decoded_dataset`:

- `row_dataset`: a batch is gathered from rows of tensors. No sample is random, and each tensor has a row per sample.
- `sample_dataset`: single samples are stored. Random ones are stored before their first random transform, which
  `split_transforms` finds.
- `tensor_dataset`: random transforms take uint8 tensors, in threads. `tensor_transforms` lists the supported ones.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from vitmnist.data.random_samples import RandomSampleError, choose_probes, read_probes
from vitmnist.errors import ConfigError, DataError, UserError, format_error, suggest_names
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.original_dataloader import check_replaceable, fetch_sample
from vitmnist.replacement.row_dataset import NoRowPerSampleError, replace_by_rows
from vitmnist.replacement.sample_dataset import replace_by_samples
from vitmnist.replacement.split_transforms import split_transforms
from vitmnist.replacement.tensor_dataset import apply_to_tensors, check_supported
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import OutOfSpaceError, keep_freed_memory
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import StoreOptions


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
    `default_rng()`, are not detected. Later changes of the transforms are an error if their `repr` or an attribute that
    is a number, a flag or a string shows them. Later changes of the data are not detected.

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
    replace = partial(_replace, dataloader, to_tensors=transforms == "tensor")
    try:
        if loader == "auto":
            with suppress(OutOfSpaceError):  # In a handler, its traceback would keep the samples decoded so far.
                return replace(in_memory)
        return replace(in_memory if loader == "ram" else in_file)
    except UserError as error:
        # Only `auto` may return the original: a user who names a loader or transforms="tensor" relies on its speed.
        if loader != "auto" or transforms == "tensor":
            raise
        warnings.warn(f"from_dataloader returns the DataLoader as it is, undecoded: {error}", stacklevel=2)
        return dataloader


def _replace(dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool) -> DataLoader[Any]:
    """Build a replacement that stores its samples as `options` say. Raises the errors of `from_dataloader`."""
    check_replaceable(dataloader)
    dataset: Any = dataloader.dataset
    with _explain_errors("cache" if options.folder else "ram"), preserve_random_state(dataset, dataloader.collate_fn):
        replacement = _build(dataloader, options, to_tensors, choose_probes(len(dataset)))
    decoded: Any = replacement.dataset
    decoded.change_guard.allow_changes_by_reading(dataloader.collate_fn)
    return replacement


def _build(dataloader: DataLoader[Any], options: StoreOptions, to_tensors: bool, probes: list[int]) -> DataLoader[Any]:
    """Build the form of replacement that fits the probes, which are the indices of some samples.

    Raises `RandomSampleError` if any sample is random and this form would store it.
    """
    dataset: Any = dataloader.dataset
    samples, random_sample = read_probes(partial(fetch_sample, dataset.__getitem__), probes, dataset)
    if random_sample:
        stages = split_transforms(dataset, probes)
        if to_tensors:
            check_supported(dataloader, stages)
        decoded = [fetch_sample(stages.decode, index) for index in probes]
        exact = replace_by_samples(dataloader, options, decoded, stages)
        return apply_to_tensors(exact, stages, probes) if to_tensors else exact
    with suppress(NoRowPerSampleError):  # In a handler, its traceback would keep the rows decoded so far.
        return replace_by_rows(dataloader, options, probes, samples)
    return replace_by_samples(dataloader, options, samples)


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Begin the message of an error with the name of the loader, and turn an unknown error into a `DataError`."""
    try:
        yield
    except RandomSampleError as error:
        raise ConfigError(
            f"{name}: {error} apart from the transforms in the attributes transform and transforms of the dataset (not "
            "of its class), or they are random for few samples only, or it keeps a state from sample to sample; move "
            "all random steps there, or use the DataLoader as it is"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # The dataset and the collate function can raise any error.
        raise DataError(f"{name}: {format_error(error)}") from error
