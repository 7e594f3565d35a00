"""Reads all samples of a dataset once, on all cores, and keeps them in memory or in a memory-mapped file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from vitmnist.data.checksums import Checksums
from vitmnist.data.collate import unchanged
from vitmnist.data.decoded_cache import Chunks, decode_once, decode_temporarily
from vitmnist.data.randomness import refusing_random
from vitmnist.errors import DataError, UserError, described
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.encoding import COLUMNS, OBJECT
from vitmnist.replacement.samples import Samples, encode, naming, starts_of
from vitmnist.replacement.shared_file import SharedFile
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits

CHUNK_NBYTES, MAX_CHUNK = 2**22, 256  # that a process hands over at a time: those of a cache must fit into /dev/shm
PARTS = 32  # chunks for each worker, at least: all should end at the same time
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
        in_memory: Callable[[], Any],
    ) -> tuple[tuple[Tensor, ...], tuple[Checksums, ...]]:
        """The tensors of all chunks, and the checksums of those in a file.

        Args:
            contents: identifies them for other processes; None keeps them for this process alone.
            in_memory: reads them into memory.
        """
        if self.name != "cache":
            return in_memory(), ()
        if contents:
            entry = decode_once(self.folder, contents, size, chunks, names=files)
        else:
            entry = decode_temporarily(self.folder, size, chunks, files)
        return entry.mapped, entry.checksums


def keep_samples(source: Any, probed: Sequence[Any], dataloader: DataLoader[Any], store: Store) -> Samples:
    """All samples of a dataset.

    Args:
        probed: samples of `source` by which the memory is estimated.
        dataloader: its settings for workers are used.

    Raises:
        DataError: a sample that cannot be read or kept; names it.
        DoesNotFitError: memory or disk is too small.
    """
    size, for_file = len(source), store.name == "cache"
    structure: TreeSpec | None = tree_structure(probed[0])
    encoded = [encode(sample, structure, for_file=for_file) for sample in probed]
    if any(rows and rows[0][0] == OBJECT for rows, _ in encoded):
        structure, encoded = None, [encode(sample, None) for sample in probed]
    content_nbytes = sum(len(part) for _, parts in encoded for part in parts)
    sample_nbytes = content_nbytes / len(probed) + 8 * COLUMNS * len(encoded[0][0])

    def check(needed: float) -> None:
        try:
            check_fits(store.name, Memory(int(needed)), torch.device("cpu"))
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{error}; loader='cache' keeps it in a file") from error

    read = partial(_encode_chunk, source, structure, for_file)

    def in_memory() -> tuple[Tensor, ...]:
        check(expected := sample_nbytes * size)
        content, shapes, starts = SharedFile(), [], []
        for start, rows in read_chunks(dataloader, source, sample_nbytes, partial(read, content)):
            shapes.append(torch.from_numpy(rows))
            starts.append(start + starts_of(shapes[-1]))
            if content.nbytes > expected:
                check(further := expected / 8)
                expected += further
        return content.tensor(), torch.cat(shapes), torch.cat(starts)

    contents = store.fingerprint and f"{store.fingerprint}, {size} samples of {structure}"
    chunks = partial(read_chunks, dataloader, source, sample_nbytes, partial(read, None))
    (content, shapes, *starts), checksums = store.keep(contents, chunks, size, FILES, in_memory)
    if checksums:
        checksums[1].checked(shapes)
    start = starts[0] if starts else starts_of(shapes)
    return Samples(content, shapes, start, structure, checksums=checksums[1] if checksums else None)


def _encode_chunk(
    source: Any, structure: TreeSpec | None, for_file: bool, file: SharedFile | None, indices: Sequence[int]
) -> tuple[Any, Any]:
    """The content and shapes of some samples; with a file, where the content begins there."""
    shapes: list[Any] = []
    content: list[Any] = []
    for index in indices:
        sample = source[index]
        with naming(f"sample {index}"):
            values, parts = encode(sample, structure, for_file=for_file)
        shapes.append(values)
        content += parts
    rows = np.array(shapes, dtype=np.int64)
    if file:  # an array is sent through a pipe, which takes less time for so little than a tensor in /dev/shm
        return file.append(content), rows
    joined = np.frombuffer(bytearray().join(content), dtype=np.uint8)
    return torch.from_numpy(joined), torch.from_numpy(rows)


def read_chunks(
    dataloader: DataLoader[Any], source: Any, sample_nbytes: float, read: Callable[[Sequence[int]], Any]
) -> Iterator[Any]:
    """The results of `read` for consecutive samples, up to the end of a DataLoader's dataset.

    Args:
        source: the dataset whose samples `read` reads.

    Raises:
        DataError: a sample that cannot be read.
        RandomSampleError: a sample that is random.
    """
    workers, size = decoding_workers(dataloader), len(dataloader.dataset)  # type: ignore[arg-type]
    most = min(MAX_CHUNK, size // (PARTS * max(workers, 1)), int(CHUNK_NBYTES / max(sample_nbytes, 1)))
    settings: dict[str, Any] = {"multiprocessing_context": dataloader.multiprocessing_context} if workers else {}
    chunks: Any = DataLoader(
        _ChunkedDataset(dataloader.dataset, source=source, read=read, samples=max(most, 1)),
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,
        worker_init_fn=dataloader.worker_init_fn,
        generator=torch.Generator(),
        **settings,
    )
    chunks.is_internal = True  # `vitmnist diagnose` observes only the user's loaders
    with tqdm(total=size, desc="decoding once", unit=" samples", leave=False, disable=None, delay=2) as progress:
        for chunk in chunks:
            if isinstance(chunk, UserError):
                raise chunk
            yield chunk
            progress.update(min(chunks.dataset.samples, size - progress.n))


class _ChunkedDataset(DecodedDataset):
    """What `read` makes of some `samples` at a time; to the user's `worker_init_fn` it looks like the dataset."""

    def __len__(self) -> int:
        return (len(self.original) + self.samples - 1) // self.samples  # type: ignore[no-any-return]

    def __getitem__(self, chunk: int) -> Any:
        indices = range(len(self.original))[chunk * self.samples : (chunk + 1) * self.samples]
        try:
            with refusing_random(self.source.__getitem__, indices, self.source):
                return self.read(indices)
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
