"""Replaces a `DataLoader`: by one that gathers rows of tensors, or by one that applies random transforms each time.

For random samples and batches without rows, the deterministic part of each sample is kept; random transforms and the
collate function run every time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from vitmnist.data.randomness import preserved_random_state, read_probes, seed_generators
from vitmnist.errors import ConfigError, described, naming
from vitmnist.replacement.decoded_dataset import (
    CollateGathered,
    DecodedDataLoader,
    GatheredDataset,
    Location,
    NamedCollate,
    TransformedDataset,
    keep_rows,
    keep_samples,
    read_batch,
)
from vitmnist.replacement.drawn_transforms import DrawnDataset, can_be_drawn
from vitmnist.replacement.original import (
    EagerDataLoader,
    check_rows,
    check_same_batches,
    rebuilt,
    seeded_batch,
    workers_needed,
)
from vitmnist.replacement.split_transforms import SplitTransforms, Transform, TransformGuard, transform_parts
from vitmnist.replacement.tensor_dataloader import (
    BATCH_DIMS,
    DeferredCollate,
    DeferredTransforms,
    TensorDataLoader,
    make_deferred,
)
from vitmnist.replacement.tensor_transforms import picture_difference, split_trailing
from vitmnist.store.read_once import unchanged
from vitmnist.store.samples import BYTE_MODES, Samples
from vitmnist.store.tree import find_difference, flatten


def replace_fixed(dataloader: DataLoader[Any], store: Location, probed: list[Any]) -> Any:
    """The replacement of a `DataLoader`; raises as `from_dataloader`, and `NoRowsError`.

    Args:
        probed: samples on which the collate function is tried.
    """
    dataset: Any = dataloader.dataset
    collate, on_device = dataloader.collate_fn, store.loader == "gpu_slice"
    if on_device and workers_needed(dataloader):
        raise ConfigError(
            "gpu_slice: the order of this DataLoader depends on its workers, which cannot deliver from the device; "
            "give it num_workers=0"
        )
    first = check_rows(NamedCollate(collate, "probes"), probed)
    guard = TransformGuard(dataset, [*transform_parts(dataset), collate])
    fingerprint = store.fingerprint
    if default_collate is collate:
        fingerprint = fingerprint or getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset
    batches = keep_rows(dataloader, first, store, fingerprint)
    workers = workers_needed(dataloader)
    replaced = rebuilt(
        dataloader,
        EagerDataLoader if dataloader.num_workers and not workers else DecodedDataLoader,
        dataset=GatheredDataset(dataset, guard, batches),
        collate_fn=CollateGathered(collate),
        num_workers=workers,
        pin_memory=dataloader.pin_memory and not on_device,
    )
    check_same_batches(
        dataloader,
        replaced,
        is_random=False,
        options=(fingerprint and "the samples of this fingerprint=") or "",
    )
    guard.ignore_changes()
    return replaced


class UserDecodeTransform(Dataset[Any]):
    """Like `SplitDataset`, for a dataset whose two steps the user has named.

    Args:
        probed: the samples of `probes`, decoded; read here if None.
    """

    splits: tuple[SplitTransforms, ...] = ()

    def __init__(
        self, decode: Transform, transform: Transform, original: Any, probes: Sequence[int], probed: Any = None
    ) -> None:
        self.decode, self.transform, self.original = decode, transform, original
        self.probed = read_probes(self.__getitem__, probes, (decode, original)) if probed is None else probed

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> Any:
        with naming(f"sample {index}"):
            return self.decode(index)


def replace_random(
    dataloader: DataLoader[Any], store: Location, source: Any, probes: list[int], of_tensors: bool
) -> Any:
    """The replacement of a `DataLoader`, with its own workers; raises as `from_dataloader`.

    Args:
        source: a `SplitDataset` or `UserDecodeTransform`.
        probes: indices of the samples `source.probed`.
        of_tensors: random transforms get tensors, and the last ones whole batches, by a `DeferredCollate`.
    """
    dataset: Any = dataloader.dataset
    deterministic = [part for split in source.splits for part in split.deterministic]
    keeps_results = isinstance(source, UserDecodeTransform) and source.transform is unchanged
    guard = TransformGuard(dataset, transform_parts(dataset) if keeps_results else deterministic)
    once = re.sub(" at 0x[0-9a-f]+", "", str([split.deterministic for split in source.splits]))  # addresses vary
    store = replace(store, fingerprint=store.fingerprint and f"{store.fingerprint}, {once}")
    samples = keep_samples(source, source.probed, dataloader, store)
    exact = TransformedDataset(dataset, guard, samples, source.transform)
    replaced = rebuilt(dataloader, DecodedDataLoader, dataset=exact)
    is_users = isinstance(source, UserDecodeTransform)
    options = ["decode= and transform="] if is_users and not keeps_results else []
    options += ["the samples of this fingerprint="] if store.fingerprint else []
    check_same_batches(dataloader, replaced, is_random=True, options=" or ".join(options))
    guard.ignore_changes()
    are_bytes = samples.structure is not None and samples.image_modes <= BYTE_MODES
    if is_users or not (of_tensors or are_bytes):  # ToTensor may scale other modes differently
        return replaced
    return _with_batch_transforms(replaced, guard, samples, source, probes, of_tensors)


def _with_batch_transforms(
    exact: DataLoader[Any], guard: TransformGuard, samples: Samples, source: Any, probes: list[int], of_tensors: bool
) -> Any:
    """The replacement whose last transforms are applied to whole batches, where that gives the same batches.

    Args:
        exact: the replacement that applies all of them to samples.
    """
    collate: Any = exact.collate_fn
    splits, pictorial, trailing = split_trailing(source.splits, of_tensors)
    if of_tensors:
        mean, largest = picture_difference(source.splits, splits, pictorial, samples, probes)
        if largest:
            warnings.warn(
                f"transforms='tensor': the same random transforms, with pixels that differ by {mean:.2g} of 255 on "
                f"average, at most by {largest:.3g}",
                stacklevel=5,
            )
        samples = samples.with_tensors()
    elif not trailing:
        return exact
    finishing = [SplitTransforms(random=[*split.random, *trailing]) for split in splits]
    unfinished, finished = (partial(source.transform, splits=part) for part in (splits, finishing))
    like = partial(TransformedDataset, exact.dataset.original, guard, samples)  # type: ignore[attr-defined]
    datasets = like(unfinished), like(finished), exact.dataset
    try:
        batch, expected, original = (seeded_batch(dataset, collate, probes[:2]) for dataset in datasets)
        finish = make_deferred(trailing, batch, expected, original, of_tensors)
    except Exception as error:  # the collate function gets bytes, and may need floats
        if of_tensors:
            raise ConfigError(
                "transforms='tensor': the collate function mixes or converts pictures, and gets them as bytes, before "
                f"their last transforms ({described(error)}); use transforms='exact'"
            ) from error
        return exact
    dataset: Any = like(finished, unfinished)
    if of_tensors and all(can_be_drawn(part) for split in finishing for part in split.random):
        dtypes = [leaf.dtype for leaf in flatten(expected)[0] if isinstance(leaf, Tensor) and leaf.dim() == BATCH_DIMS]
        drawn = DrawnDataset(
            *(exact.dataset.original, guard, samples, finished, unfinished),  # type: ignore[attr-defined]
            transforms=[split.random for split in splits],
            dtype=dtypes[0] if dtypes else torch.float32,
            threads=exact.num_workers,
        )
        if _are_same([dataset, drawn], collate, finish, probes):
            dataset = drawn
    kind = TensorDataLoader if of_tensors else DecodedDataLoader
    return rebuilt(exact, kind, dataset=dataset, collate_fn=DeferredCollate(collate, finish, dataset))


def _are_same(datasets: list[Any], collate: Any, finish: DeferredTransforms, probes: list[int]) -> bool:
    """Whether two forms of a dataset draw the same and make the same batches of it, bit for bit."""
    results: list[Any] = []
    for dataset in datasets:
        results.append([])
        deferred = DeferredCollate(collate, finish, dataset)
        for index in probes:
            with preserved_random_state(dataset, collate):
                seed_generators(0, 0, 0)
                try:
                    batch = read_batch(dataset, deferred, [index])
                except Exception:  # torchvision may not draw for what is no picture
                    return False
                results[-1].append((batch, torch.get_rng_state()))
    return not find_difference(*results)
