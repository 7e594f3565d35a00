"""Samples decoded once into memory-mapped files, for sets that are slow to decode or larger than memory.

FOLDER/KEY/images.bin   the samples one after another, as their dtype is stored in memory
FOLDER/KEY/labels.bin   their labels
FOLDER/KEY/cache.json   shapes, dtypes, checksums and the caller's notes; written last
FOLDER/KEY.lock         held by the process that decodes, while others wait
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from filelock import FileLock
from torch import Tensor

from vitmnist.data.tensors import TensorSet, digest
from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's mmap since 3.11

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.uint16, torch.uint32, torch.uint64, torch.complex64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip

Chunks = Iterable[tuple[Tensor, Tensor]]
"""Images `[B, …]` and labels `[B, …]` of consecutive samples."""


@dataclass(frozen=True)
class CacheEntry:
    """The contents of a cache: mapped images and labels in memory, the images' SHA-256, and the caller's notes."""

    tensors: TensorSet
    sha256: str
    notes: dict[str, Any]


class DamagedError(Exception):
    """The files of a cache are not what was written."""


class DecodingError(Exception):
    """An `OSError` of the samples, kept apart from those of the cache's own files."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def decode_once(
    folder: Path,
    fingerprint: str,
    decode: Callable[[], Chunks],
    make_notes: Callable[[TensorSet], dict[str, Any]] = lambda tensors: {},
    verify: bool = True,
) -> CacheEntry:
    """The cache of `fingerprint` in `folder`; if it is missing or damaged, one process decodes while others wait.

    Args:
        fingerprint: identifies the contents; other contents need another one.
        make_notes: called once with the decoded tensors; returns plain values to store with them.
        verify: compare the images with their checksum, which reads them all; sizes and labels are always compared.

    Raises:
        DataError: the folder cannot be written, or there are no samples.
    """
    key = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    place = folder / key
    try:
        return _open(place, fingerprint, verify)
    except DamagedError as damage:
        log.debug("%s: %s", place, damage)  # perhaps another process is replacing it: checked again under the lock
    with _named_errors(folder), FileLock(_existing(folder) / f"{key}.lock"):
        if place.is_dir():
            try:
                return _open(place, fingerprint, verify)
            except DamagedError as damage:
                log.warning("the cache %s was damaged (%s) and is decoded again", place, damage)
        log.info("decoding once into %s", place)
        _remove(folder, key)  # left by a process that was killed: a living one would hold the lock
        fresh = folder / f".{key}.{secrets.token_hex(4)}"
        fresh.mkdir()
        try:
            with (fresh / "images.bin").open("x+b") as images, (fresh / "labels.bin").open("x+b") as labels:
                tensors, record = _write(images, labels, decode())
                for file in (images, labels):
                    os.fsync(file.fileno())
            record |= {"fingerprint": fingerprint, "notes": make_notes(tensors)}
            write_atomic(fresh / "cache.json", json.dumps(record, indent=2).encode())
            if place.exists():
                place.rename(folder / f".{key}.damaged")
            fresh.rename(place)
        finally:
            _remove(folder, key)
        return _open(place, fingerprint, verify=False)


def decode_temporarily(folder: Path, decode: Callable[[], Chunks]) -> TensorSet:
    """Mapped tensors in unnamed files, which disappear with the tensors or the process.

    Raises:
        DataError: as in `decode_once`.
    """
    with _named_errors(folder), TemporaryFile(dir=_existing(folder)) as images, TemporaryFile(dir=folder) as labels:
        return _write(images, labels, decode())[0]


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the cache's files into a `DataError` that says what to change."""
    try:
        yield
    except DecodingError as error:
        raise error.reason from None
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be used: {error.strerror or error}; "
            "name one that can be used with data.loader.folder=FOLDER or data.root=FOLDER (folder=… of make_loader)"
        ) from error


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove(folder: Path, key: str) -> None:
    for unfinished in folder.glob(f".{key}.*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _decoded(chunks: Chunks) -> Chunks:
    try:
        yield from chunks
    except OSError as error:
        raise DecodingError(error) from error


def _write(images: IO[bytes], labels: IO[bytes], chunks: Chunks) -> tuple[TensorSet, dict[str, Any]]:
    """Write the chunks to two files; the mapped tensors, and shape, dtype and checksum of each by name."""
    files = {"images": images, "labels": labels}
    checksums = {name: hashlib.sha256() for name in files}
    forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
    samples = 0
    for chunk in _decoded(chunks):
        for (name, file), tensor in zip(files.items(), chunk, strict=True):
            if str(tensor.dtype) not in DTYPES:
                raise DataError(f"{name}: a cache cannot hold {tensor.dtype}; choose ram or disk")
            forms[name] = tensor.shape[1:], tensor.dtype
            content = tensor.contiguous().view(torch.uint8).numpy().data
            file.write(content)
            checksums[name].update(content)
        samples += len(chunk[0])
    if not samples:
        raise DataError("there is no sample to decode")
    record: dict[str, Any] = {
        name: {"shape": [samples, *shape], "dtype": str(dtype), "sha256": checksums[name].hexdigest()}
        for name, (shape, dtype) in forms.items()
    }
    for file in files.values():
        file.flush()
    return TensorSet(*(_map(file, record[name]) for name, file in files.items()), mapped=True), record


def _open(place: Path, fingerprint: str, verify: bool) -> CacheEntry:
    """The cache in `place`.

    Raises:
        DamagedError: it is missing, incomplete, or of other contents.
    """
    try:
        record = json.loads((place / "cache.json").read_text())
        if record["fingerprint"] != fingerprint:
            raise DamagedError("it is of other contents")
        with (place / "images.bin").open("rb") as images_file, (place / "labels.bin").open("rb") as labels_file:
            images, labels = _map(images_file, record["images"]), _map(labels_file, record["labels"]).clone()
        entry = CacheEntry(TensorSet(images, labels, mapped=True), record["images"]["sha256"], dict(record["notes"]))
        if digest(labels) != record["labels"]["sha256"] or (verify and digest(images) != entry.sha256):
            raise DamagedError("its checksum does not match")
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    return entry


def _map(file: IO[bytes], form: Mapping[str, Any]) -> Tensor:
    shape, dtype = form["shape"], DTYPES[form["dtype"]]
    size, found = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
    if found != size:
        raise DamagedError(f"it has {found} bytes, not {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    # Private: writing into a view copies the page and never changes the file. Without a reserve, because the kernel
    # would refuse to map more than memory; torch.from_file has no flags for either.
    flags = {"flags": mmap.MAP_PRIVATE | MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    return torch.frombuffer(mmap.mmap(file.fileno(), size, **flags), dtype=dtype).view(shape)
