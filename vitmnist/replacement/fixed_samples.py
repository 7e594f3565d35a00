"""Replaces a `DataLoader` whose samples are not random: all are kept as rows of tensors, and batches are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from vitmnist.errors import ConfigError
from vitmnist.replacement.batch_tensors import BatchTensors
from vitmnist.replacement.decoded_dataset import CollateGathered, DecodedDataLoader, GatheredDataset
from vitmnist.replacement.keep_samples import Store, read_chunks
from vitmnist.replacement.original import (
    EagerDataLoader,
    NamedCollate,
    check_rows,
    check_same_batches,
    read_batch,
    rebuilt,
    workers_needed,
)
from vitmnist.replacement.shared_file import SharedFile
from vitmnist.replacement.split_transforms import TransformGuard, transform_parts
from vitmnist.runtime.memory import Memory, check_fits


def replace_fixed(dataloader: DataLoader[Any], store: Store, probed: list[Any]) -> Any:
    """The replacement of a `DataLoader`; raises as `from_dataloader`, and `NoRowsError`.

    Args:
        probed: samples on which the collate function is tried.
    """
    dataset: Any = dataloader.dataset
    collate, size, on_device = dataloader.collate_fn, len(dataset), store.name == "gpu_slice"
    if on_device and workers_needed(dataloader):
        raise ConfigError(
            "gpu_slice: the order of this DataLoader depends on its workers, which cannot deliver from the device; "
            "give it num_workers=0"
        )
    first = check_rows(NamedCollate(collate, "probes"), probed)
    guard = TransformGuard(dataset, [*transform_parts(dataset), collate])
    read = partial(_read_tensors, dataset, collate, first)

    def in_memory() -> tuple[Tensor, ...]:
        needed = first.sample_nbytes * size
        is_cuda = on_device and store.device.type == "cuda"
        check_fits(store.name, Memory(needed, needed if is_cuda else 0), store.device)
        rows = [SharedFile() for _ in first.tensors]
        for _ in read_chunks(dataloader, dataset, first.sample_nbytes, partial(read, rows)):
            pass
        like = zip(rows, first.tensors.values(), strict=True)
        return tuple(file.tensor(part.dtype, (size, *part.shape[1:])).to(part.device) for file, part in like)

    fingerprint = store.fingerprint
    if default_collate is collate:
        fingerprint = fingerprint or getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset
    contents = fingerprint and f"{fingerprint}, {size} samples, {first.forms}"
    files = [str(number) for number in range(len(first.tensors))]
    chunks = partial(read_chunks, dataloader, dataset, first.sample_nbytes, partial(read, None))
    tensors, checksums = store.keep(contents, chunks, size, files, in_memory)
    if on_device:
        tensors = tuple(tensor.to(store.device) for tensor in tensors)
    batches = replace(first, tensors=dict(zip(first.tensors, tensors, strict=True)), checksums=checksums)
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


def _read_tensors(
    dataset: Any,
    collate: Callable[[Any], Any],
    first: BatchTensors,
    files: Sequence[SharedFile] | None,
    indices: Sequence[int],
) -> tuple[Tensor, ...] | None:
    """The tensors of some samples, unless they are written to files."""
    chunk = BatchTensors.of(read_batch(dataset, collate, indices), len(indices))
    first.check_same(chunk)
    if files is None:
        return tuple(chunk.tensors.values())
    for file, rows in zip(files, chunk.tensors.values(), strict=True):
        file.write_rows(indices[0], rows)
    return None
