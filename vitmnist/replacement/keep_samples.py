"""Reads all samples of a dataset once, on all cores, and keeps them in memory or in a memory-mapped file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from vitmnist.data.checksums import Checksums
from vitmnist.data.collate import unchanged
from vitmnist.data.decoded_cache import Chunks, decode_once, decode_temporarily
from vitmnist.data.seeding import refusing_draws
from vitmnist.errors import DataError, UserError, described
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.samples import OBJECT, Samples, encode, load, naming
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits

CHUNK = 16  # samples that a process hands over at a time: those of photographs must fit into /dev/shm
FILES = ("images", "shapes")  # of a cache, see `Samples`


@dataclass(frozen=True)
class Store:
    """Where decoded samples are kept; see `from_dataloader`."""

    name: str
    device: torch.device
    folder: Path
    fingerprint: str | None

    def keep(
        self,
        contents: str | None,
        chunks: Callable[[], Chunks],
        size: int,
        files: Sequence[str],
        load: Callable[[], Any],
    ) -> tuple[tuple[Tensor, ...], tuple[Checksums, ...]]:
        """The tensors of all chunks, and the checksums of those in a file.

        Args:
            contents: identifies them for other processes; None keeps them for this process alone.
            load: reads them into memory.
        """
        if self.name != "cache":
            return load(), ()
        if contents:
            entry = decode_once(self.folder, contents, size, chunks, names=files)
        else:
            entry = decode_temporarily(self.folder, size, chunks, files)
        return entry.mapped, entry.checksums


def keep_samples(source: Any, probes: Sequence[int], dataloader: DataLoader[Any], store: Store) -> Samples:
    """All samples of a dataset.

    Args:
        probes: indices of samples by which the memory is estimated.
        dataloader: its settings for workers are used.

    Raises:
        DataError: a sample that cannot be read or kept; names it.
        DoesNotFitError: memory or disk is too small.
    """
    size, for_file, tried = len(source), store.name == "cache", [source[index] for index in probes]
    structure: TreeSpec | None = tree_structure(tried[0])
    encoded = [encode([sample], structure, for_file=for_file) for sample in tried]
    if any(shapes[0, 0, 0] == OBJECT for _, shapes in encoded if shapes.numel()):
        structure, encoded = None, [encode([sample], None) for sample in tried]
    chunks = partial(read_chunks, dataloader, partial(_encode_chunk, source, structure, for_file))

    def check(needed: int) -> None:
        try:
            check_fits(store.name, Memory(needed), torch.device("cpu"))
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{error}; loader='cache' keeps it in a file") from error

    def in_memory() -> tuple[Tensor, Tensor]:
        expected = sum(len(content) for content, _ in encoded) * size // len(probes)
        check(expected + encoded[0][1].nbytes * size)
        return load(chunks(), expected, check)  # type: ignore[arg-type]

    contents = store.fingerprint and f"{store.fingerprint}, {size} samples of {structure}"
    (content, shapes), checksums = store.keep(contents, chunks, size, FILES, in_memory)
    if checksums:
        checksums[1].checked(shapes)
    return Samples(content, shapes, structure, checksums=checksums[1] if checksums else None)


def _encode_chunk(
    source: Any, structure: TreeSpec | None, for_file: bool, indices: Sequence[int]
) -> tuple[Tensor, ...]:
    encoded = []
    for index in indices:
        sample = source[index]
        with naming(f"sample {index}"):
            encoded.append(encode([sample], structure, for_file=for_file))
    content, shapes = zip(*encoded, strict=True)
    return torch.cat(content), torch.cat(shapes)


def read_chunks(
    dataloader: DataLoader[Any], read: Callable[[Sequence[int]], tuple[Tensor, ...]]
) -> Iterator[tuple[Tensor, ...]]:
    """The results of `read` for consecutive samples, up to the end of a DataLoader's dataset.

    Raises:
        DataError: a sample that cannot be read, or draws a random number when it is read.
    """
    workers = decoding_workers(dataloader)
    settings: dict[str, Any] = {"multiprocessing_context": dataloader.multiprocessing_context} if workers else {}
    chunks: Any = DataLoader(
        _ChunkedDataset(dataloader.dataset, read=read),
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,
        worker_init_fn=dataloader.worker_init_fn,
        generator=torch.Generator(),
        **settings,
    )
    chunks.is_internal = True  # `vitmnist diagnose` observes only the user's loaders
    for chunk in tqdm(chunks, desc="decoding once", unit=f"{CHUNK} samples", leave=False, disable=None):
        if isinstance(chunk, UserError):
            raise chunk
        yield chunk


class _ChunkedDataset(DecodedDataset):
    """What `read` makes of `CHUNK` samples at a time; to the user's `worker_init_fn` it looks like the dataset."""

    def __len__(self) -> int:
        return (len(self.original) + CHUNK - 1) // CHUNK

    def __getitem__(self, chunk: int) -> tuple[Tensor, ...] | UserError:
        indices = range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.original)))
        try:
            with refusing_draws(indices):
                return self.read(indices)  # type: ignore[no-any-return]
        except Exception as error:  # torch would turn a worker's traceback into the message
            return error if isinstance(error, UserError) else DataError(described(error))


def decoding_workers(dataloader: DataLoader[Any]) -> int:
    """As many workers as cores; none if the dataset may hold an open file, which forked processes cannot share."""
    dataset = dataloader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_torchvision = any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)
    # A spawned process would import the script again. Asking for the method itself would fix it for the whole process.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return available_cores() if dataloader.num_workers or (is_torchvision and method == "fork") else 0
