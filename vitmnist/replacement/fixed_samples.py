"""Replaces a `DataLoader` whose samples are not random: all are kept as rows of tensors, and batches are gathered."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, default_collate

from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import (
    CollateGathered,
    DecodedDataLoader,
    GatheredDataset,
    Location,
    NamedCollate,
    keep_rows,
)
from vitmnist.replacement.original import (
    EagerDataLoader,
    check_rows,
    check_same_batches,
    rebuilt,
    workers_needed,
)
from vitmnist.replacement.split_transforms import TransformGuard, transform_parts


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
