"""Replaces a `DataLoader` whose samples are random, or whose batches have no row per sample.

What is not random of each sample is kept; the rest of its transforms and the collate function are applied each time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitmnist.data.collate import unchanged
from vitmnist.data.decoding import find_random
from vitmnist.errors import ConfigError, described, naming
from vitmnist.replacement.decoded_dataset import TransformedDataset
from vitmnist.replacement.drawn_samples import DrawnDataset
from vitmnist.replacement.drawn_transforms import can_be_drawn
from vitmnist.replacement.finish_batch import BATCH_DIMS, CollateFinished, FinishBatch, finish_of
from vitmnist.replacement.frozen_state import FrozenState
from vitmnist.replacement.halves import DividedDataset, Halves
from vitmnist.replacement.keep_decoded import Location, keep_samples
from vitmnist.replacement.original import TRIED, check_same_batches, rebuilt, seeded_batch
from vitmnist.replacement.tensor_dataloader import TensorDataLoader
from vitmnist.replacement.tensor_form import picture_difference, without_closing
from vitmnist.store.difference import find_difference
from vitmnist.store.samples import BYTE_MODES, Samples
from vitmnist.store.tree import flatten


@dataclass(frozen=True)
class GivenHalves(Dataset[Any]):
    """Like `DividedDataset`, for a dataset whose two steps the user has named."""

    decode: Callable[[int], Any]
    transform: Callable[[Any], Any]
    original: Any
    halves: tuple[Halves, ...] = ()

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> Any:
        with naming(f"sample {index}"):
            return self.decode(index)


def transformed(
    dataloader: DataLoader[Any], store: Location, state: FrozenState, of_tensors: bool, given: GivenHalves | None
) -> Any:
    """The replacement of a `DataLoader`, with its own workers; raises as `from_dataloader`.

    Args:
        state: that of the dataset, frozen before samples are kept.
        of_tensors: random transforms get tensors, and the last ones whole batches, by a `CollateFinished`.
        given: the two steps of the dataset, if the user has named them.
    """
    dataset: Any = dataloader.dataset
    size = len(dataset)
    probes = sorted({probe * size // TRIED for probe in range(TRIED)})
    source: Any = given or DividedDataset(dataset, probes)
    if random := find_random(source, list):
        raise ConfigError(
            f"{store.loader}: {random} is random apart from the transforms in the attributes transform and "
            "transforms of the dataset (not of its class), or one of these keeps a state from sample to sample; move "
            "all that is random there, name the two steps with decode= and transform=, or use the DataLoader as it is"
        )
    once = re.sub(" at 0x[0-9a-f]+", "", str([half.once for half in source.halves]))  # addresses vary by process
    store = replace(store, fingerprint=store.fingerprint and f"{store.fingerprint}, {once}")
    samples = keep_samples(source, [source[index] for index in probes], dataloader, store)
    # Still applied each time, unlike the dataset.
    live = [one for half in source.halves for one in half.always]
    state.ignore_changes(live=[*live, dataloader.collate_fn])
    exact = TransformedDataset(dataset, state, samples, source.transform)
    replaced = rebuilt(dataloader, dataset=exact)
    options = ["decode= and transform="] if given and given.transform is not unchanged else []
    options += ["the samples of this fingerprint="] if store.fingerprint else []
    check_same_batches(dataloader, replaced, is_random=True, options=" or ".join(options))
    if given or not (
        of_tensors or (samples.structure and samples.image_modes <= BYTE_MODES)
    ):  # ToTensor may scale other modes differently
        return replaced
    return _with_batch_transforms(replaced, state, samples, source, probes, of_tensors)


def _with_batch_transforms(
    exact: DataLoader[Any], state: FrozenState, samples: Samples, source: Any, probes: list[int], of_tensors: bool
) -> Any:
    """The replacement whose last transforms are applied to whole batches, where that gives the same batches.

    Args:
        exact: the replacement that applies all of them to samples.
    """
    collate: Any = exact.collate_fn
    halves, pictorial, closing = without_closing(source.halves, of_tensors)
    if of_tensors:
        mean, largest = picture_difference(source.halves, halves, pictorial, samples, probes)
        if largest:
            warnings.warn(
                f"transforms='tensor': the same random transforms, with pixels that differ by {mean:.2g} of 255 on "
                f"average, at most by {largest:.3g}",
                stacklevel=5,
            )
        samples = samples.with_tensors()
    elif not closing:
        return exact
    closed = [Halves(always=[*half.always, *closing]) for half in halves]
    unfinished, finished = (partial(source.transform, halves=some) for some in (halves, closed))
    like = partial(TransformedDataset, exact.dataset.original, state, samples)  # type: ignore[attr-defined]
    datasets = like(unfinished), like(finished), exact.dataset
    try:
        batch, expected, original = (seeded_batch(one, collate, probes[:2]) for one in datasets)
        finish = finish_of(closing, batch, expected, original, of_tensors)
    except Exception as error:  # the collate function gets bytes, and may need floats
        if of_tensors:
            raise ConfigError(
                "transforms='tensor': the collate function mixes or converts pictures, and gets them as bytes, before "
                f"their last transforms ({described(error)}); use transforms='exact'"
            ) from error
        return exact
    dataset: Any = like(finished, unfinished)
    if of_tensors and all(can_be_drawn(one) for half in closed for one in half.always):
        dtypes = [one.dtype for one in flatten(expected)[0] if isinstance(one, Tensor) and one.dim() == BATCH_DIMS]
        always = [half.always for half in halves]
        drawn = DrawnDataset(
            *(exact.dataset.original, state, samples, finished, unfinished),  # type: ignore[attr-defined]
            transforms=always,
            dtype=dtypes[0] if dtypes else torch.float32,
            threads=exact.num_workers,
        )
        if _are_same([dataset, drawn], collate, finish, probes):
            dataset = drawn
    kind = TensorDataLoader if of_tensors else DataLoader
    return rebuilt(exact, kind, dataset=dataset, collate_fn=CollateFinished(collate, finish, dataset))


def _are_same(datasets: list[Any], collate: Any, finish: FinishBatch, probes: list[int]) -> bool:
    """Whether two forms of a dataset draw the same and make the same batches of it, bit for bit."""
    results: list[Any] = []
    for dataset in datasets:
        results.append([])
        for index in probes:
            try:
                batch = seeded_batch(dataset, CollateFinished(collate, finish, dataset), [index])
            except Exception:  # torchvision may not draw for what is no picture
                return False
            results[-1].append((batch, torch.get_rng_state()))
    return not find_difference(*results)
