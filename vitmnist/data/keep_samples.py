"""Decodes the samples of a dataset once, on all cores, into memory or a memory-mapped file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from vitmnist.data.decoded_cache import decode_once, decode_temporarily
from vitmnist.data.decoded_dataset import DecodedDataset
from vitmnist.data.samples import Samples, encode, load, naming
from vitmnist.data.seeding import refusing_draws
from vitmnist.errors import DataError
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits

CHUNK = 16  # samples that a process hands over at a time: those of photographs must fit into /dev/shm
FILES = ("images", "shapes")  # of a cache, see `Samples`
CPU = torch.device("cpu")


def keep_samples(
    source: Any,
    probes: Sequence[int],
    dataloader: DataLoader[Any],
    folder: Path | None,
    fingerprint: str | None,
) -> Samples:
    """All samples of a dataset.

    Args:
        probes: indices of samples by which the memory is estimated.
        dataloader: whose settings for workers are used.
        folder: of a memory-mapped file; None keeps the samples in memory.
        fingerprint: as in `from_dataloader`.

    Raises:
        DataError: a sample that cannot be read or kept; names it.
        DoesNotFitError: memory or disk is too small.
    """
    size, structure = len(source), tree_structure(source[probes[0]])
    content, shapes = encode([source[index] for index in probes], structure)
    chunks = partial(_chunks, source, structure, dataloader)
    try:
        if folder is None:
            expected = len(content) * size // len(probes)
            check = partial(check_fits, "ram", device=CPU)
            check(needs=Memory(expected + shapes[0].nbytes * size))
            content, shapes = load(chunks(), expected, lambda further: check(needs=Memory(further)))
        elif fingerprint:
            contents = f"{fingerprint}, {size} samples of {structure}"
            content, shapes = decode_once(folder, contents, size, chunks, names=FILES).mapped
        else:
            content, shapes = decode_temporarily(folder, size, chunks, FILES)
    except DoesNotFitError as error:
        advice = "max_side= keeps pictures smaller" + ("" if folder else ", loader='cache' keeps them in a file")
        raise DoesNotFitError(f"{error}; {advice}") from error
    return Samples(content, shapes, structure)


class _Chunks(DecodedDataset):
    """Encoded samples, `CHUNK` at a time, or the message of an error of one of them.

    To the user's `worker_init_fn` it looks like the original dataset.
    """

    def __init__(self, original: Any, source: Any, structure: TreeSpec) -> None:
        self.__dict__.update(original=original, source=source, structure=structure)

    def __len__(self) -> int:
        return (len(self.source) + CHUNK - 1) // CHUNK

    def __getitem__(self, chunk: int) -> tuple[Tensor, Tensor] | str:
        encoded, indices = [], range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.source)))
        try:
            with refusing_draws(indices):
                for index in indices:
                    sample = self.source[index]
                    with naming(index):
                        encoded.append(encode([sample], self.structure))
        except DataError as error:
            return str(error)
        content, shapes = zip(*encoded, strict=True)
        return torch.cat(content), torch.cat(shapes)


def _chunks(source: Dataset[Any], structure: TreeSpec, dataloader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    workers = _workers(dataloader)
    settings: dict[str, Any] = {"multiprocessing_context": dataloader.multiprocessing_context} if workers else {}
    chunks: Any = DataLoader(
        _Chunks(dataloader.dataset, source, structure),
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=dataloader.worker_init_fn,
        generator=torch.Generator(),
        **settings,
    )
    chunks.is_internal = True  # `vitmnist diagnose` observes the user's alone
    for chunk in tqdm(chunks, desc="decoding once", unit=f"{CHUNK} samples", leave=False, disable=None):
        if isinstance(chunk, str):
            raise DataError(chunk)
        yield chunk


def _unchanged(chunk: Any) -> Any:
    return chunk


def _workers(dataloader: DataLoader[Any]) -> int:
    """All cores, but none if the dataset may hold an open file, which forked processes cannot share."""
    dataset = dataloader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_torchvision = any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)
    return available_cores() if dataloader.num_workers or is_torchvision else 0
