"""Decodes samples once into files, and maps the files into memory. Use it when decoding is slow or memory is short.

FOLDER/HASH/images.npy  the samples, a file for each tensor; `numpy.load(…, mmap_mode="r")` reads it
FOLDER/HASH/labels.npy  the labels. Samples of any structure are bytes in samples.npy, with their offsets in spans.npy
FOLDER/HASH/cache.json  the fingerprint, the caller's metadata, and a checksum of all files, to compare when they are
                        opened
FOLDER/HASH.lock        the lock of the process that decodes while others wait
FOLDER/.HASH.unfinished the same files while they are written
"""

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from vitmnist.errors import DataError, as_data_error
from vitmnist.runtime.file_lock import wait_for_lock
from vitmnist.runtime.files import read_json_or_yaml, rename, write_atomic
from vitmnist.runtime.memory import OutOfSpaceError, format_mib, map_private

log = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/vitmnist/vitmnist-cache"
"""The folder of caches, unless another one is configured."""
RECORD_NAME = "cache.json"
"""This file is written last: a folder without it is an incomplete cache."""
CACHE_READ_ERRORS = (OSError, ValueError, KeyError, TypeError)
"""The errors of reading a missing or damaged cache."""
FOLDER_ADVICE = (
    "data.root=FOLDER, or data.loader.folder if you set it (root= of load_dataset, folder= of make_loader and "
    "from_dataloader)"
)

Chunks = Iterable[tuple[Tensor, ...]]
"""The tensors of consecutive samples, such as images `[B, …]` and labels `[B, …]`; the last has a row per sample."""
CacheEntry = tuple[tuple[Tensor, ...], dict[str, Any]]
"""The mapped tensors of a cache, and the caller's metadata."""


def open_or_write_cache(
    folder: Path,
    fingerprint: str | None,
    size: int,
    decode: Callable[[], Chunks],
    metadata: Mapping[str, Any] = MappingProxyType({}),
    names: Sequence[str] = ("images", "labels"),
) -> CacheEntry:
    """Open the cache of `fingerprint` in `folder`. If it is missing or damaged, one process decodes while others wait.

    Args:
        fingerprint: identifies the contents. None: the files disappear with the tensors or the process.
        size: the largest number of samples that `decode` yields.
        metadata: plain values to store with the samples; `decode` can add some until it has yielded all samples.

    Raises:
        DataError: the folder cannot be written, or there are no samples.
        OutOfSpaceError: the disk has too little room; raised before anything is written.
    """
    if fingerprint is None:
        return _write_temporary_files(folder, size, decode(), names), dict(metadata)
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    entry = folder / name
    with suppress(*CACHE_READ_ERRORS):  # If another process is replacing the cache, wait for its lock below.
        return _open(entry, names)
    log.info("decoding once into %s, unless another process does", entry)
    with ExitStack() as stack:
        with _translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_lock(folder / f"{name}.lock"))
        try:
            return _open(entry, names)
        except CACHE_READ_ERRORS as damage:
            if entry.is_dir():
                log.warning("the cache %s cannot be used (%s) and is decoded again", entry, damage)
                with _translate_os_errors(folder):  # Windows keeps a folder whose files a process maps.
                    shutil.rmtree(entry)
        unfinished = folder / f".{name}.unfinished"
        try:
            _write_files(unfinished, size, decode(), names)
            record: dict[str, Any] = json.loads(json.dumps({"fingerprint": fingerprint, "metadata": dict(metadata)}))
            with _translate_os_errors(folder):
                record["crc32"] = _checksum(record, unfinished, names)
                write_atomic(unfinished / RECORD_NAME, json.dumps(record, indent=2).encode())
                rename(unfinished, entry)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return _map_files(entry, names), record["metadata"]


def _write_temporary_files(folder: Path, size: int, chunks: Chunks, names: Sequence[str]) -> tuple[Tensor, ...]:
    with ExitStack() as stack:
        with _translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files = [stack.enter_context(TemporaryFile(dir=folder)) for _ in names]
        _write(folder, files, size, chunks)
        return tuple(map(_map, files))


def _write_files(folder: Path, size: int, chunks: Chunks, names: Sequence[str]) -> None:
    with ExitStack() as stack:
        with _translate_os_errors(folder.parent):
            shutil.rmtree(folder, ignore_errors=True)  # A killed process can leave it behind.
            folder.mkdir()
            files = [stack.enter_context((folder / f"{name}.npy").open("w+b")) for name in names]
        _write(folder.parent, files, size, chunks)


@contextmanager
def _translate_os_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the cache's files into a `DataError` that says how to fix it."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be used: {error}; fix this, or name another with {FOLDER_ADVICE}"
        ) from error


def _write(folder: Path, files: Sequence[IO[bytes]], size: int, chunks: Chunks) -> None:
    counts = [0] * len(files)
    for chunk in chunks:
        with as_data_error("cache"):  # NumPy has no bfloat16, for example.
            arrays = [tensor.detach().contiguous().numpy() for tensor in chunk]
        with _translate_os_errors(folder):
            if not any(counts):
                needed = size * sum(array.nbytes for array in arrays) // max(len(arrays[-1]), 1)
                if needed > (free := shutil.disk_usage(folder).free):
                    raise OutOfSpaceError(
                        f"cache: the decoded dataset takes {format_mib(needed)} on the disk of {folder}, where "
                        f"{format_mib(free)} are free; name a folder on another disk with {FOLDER_ADVICE}, or make "
                        "the images smaller, as with data.dataset.size"
                    )
                _write_headers(files, arrays, counts)
            for file, array in zip(files, arrays, strict=True):
                file.write(array.data)
        counts = [count + len(array) for count, array in zip(counts, arrays, strict=True)]
    if not any(counts):
        raise DataError("there is no sample to decode")
    with _translate_os_errors(folder):
        _write_headers(files, arrays, counts)
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def _write_headers(files: Sequence[IO[bytes]], arrays: Sequence[np.ndarray[Any, Any]], counts: Sequence[int]) -> None:
    """Write the headers of `.npy` files for these numbers of rows. NumPy pads all headers to one length."""
    for file, array, count in zip(files, arrays, counts, strict=True):
        file.seek(0)
        dtype, shape = np.lib.format.dtype_to_descr(array.dtype), (count, *array.shape[1:])
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})


def _map(file: IO[bytes]) -> Tensor:
    """Map a `.npy` file as a tensor. Writing into the tensor copies a page, and never changes the file."""
    file.seek(0)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return torch.from_numpy(np.ndarray(shape, dtype, map_private(file), offset=file.tell()))


def _open(entry: Path, names: Sequence[str]) -> CacheEntry:
    """Open the cache in the folder `entry`; raises `CACHE_READ_ERRORS` if it cannot be used."""
    record = cast("dict[str, Any]", read_json_or_yaml(entry / RECORD_NAME))
    if record.pop("crc32") != _checksum(record, entry, names):
        raise ValueError("it is damaged")
    return _map_files(entry, names), record["metadata"]


def _map_files(entry: Path, names: Sequence[str]) -> tuple[Tensor, ...]:
    with ExitStack() as stack:
        return tuple(_map(stack.enter_context((entry / f"{name}.npy").open("rb"))) for name in names)


def _checksum(record: dict[str, Any], entry: Path, names: Sequence[str]) -> int:
    """CRC-32 of the files, and of a record without its `crc32`; takes a second for 1 to 2 GB.

    The files are read, not mapped, so that their pages do not count as memory of this process.
    """
    checksum = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    for name in names:
        with (entry / f"{name}.npy").open("rb") as file:
            while content := file.read(2**20):
                checksum = zlib.crc32(content, checksum)
    return checksum
