"""Arrays that were decoded once and are mapped into memory from then on: for sets larger than memory.

FOLDER/KEY/images.bin   the samples one after another, as their dtype lies in memory
FOLDER/KEY/labels.bin   their labels
FOLDER/KEY/cache.json   shapes, dtypes, checksums, and notes of whoever decoded them; written last
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from vitmnist.data.reading import Reading, reading
from vitmnist.data.tensors import TensorSet, digest
from vitmnist.errors import DataError
from vitmnist.runtime.files import write_whole

log = logging.getLogger(__name__)

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python knows it from 3.11 on

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
class Cached:
    """What a cache holds: mapped images, labels in memory, the images' SHA-256, and the notes."""

    arrays: TensorSet
    sha256: str
    notes: dict[str, Any]


class DamagedError(Exception):
    """A cache that cannot be what was written."""


class UndecodableError(Exception):
    """An error of the samples themselves."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def decode_once(
    folder: Path,
    fingerprint: str,
    decode: Callable[[], Chunks],
    annotate: Callable[[TensorSet], dict[str, Any]] = lambda arrays: {},
    verify: bool = True,
) -> Cached:
    """The cache of `fingerprint` in `folder`; decoded now, by one process while others wait, if it is not there.

    A damaged cache is decoded again, with a warning.

    Args:
        fingerprint: names the contents; other contents need another one.
        annotate: called once with what was decoded; what it returns is kept as the cache's notes (JSON).
        verify: compare the images with their checksum, which reads them all; sizes are always compared.

    Raises:
        DataError: the folder cannot be written, or there is no sample.
    """
    key = _key(fingerprint)
    place = folder / key
    if place.is_dir():
        try:
            return _open(place, fingerprint, verify)
        except DamagedError as damage:
            log.debug("%s: %s", place, damage)  # another process may be replacing it: looked at again under the lock
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            if place.is_dir():
                try:
                    return _open(place, fingerprint, verify)
                except DamagedError as damage:
                    log.warning("the cache %s was damaged (%s) and is decoded again", place, damage)
            for left in folder.glob(f".{key}.*"):  # by a process that was killed: whoever lives would hold the lock
                shutil.rmtree(left, ignore_errors=True)
            log.info("decoding once into %s", place)
            fresh = folder / f".{key}.{secrets.token_hex(4)}"
            fresh.mkdir()
            try:
                _write(fresh, fingerprint, decode(), annotate)
                if place.exists():
                    place.rename(folder / f".{key}.damaged")
                fresh.rename(place)
            finally:
                for left in folder.glob(f".{key}.*"):
                    shutil.rmtree(left, ignore_errors=True)
            return _open(place, fingerprint, verify=False)
    except UndecodableError as error:
        raise error.reason from None
    except OSError as error:
        raise _cannot_write(folder, error) from error


def forget(folder: Path, fingerprint: str) -> None:
    """Remove a cache, so that its contents are decoded again."""
    key = _key(fingerprint)
    with FileLock(folder / f"{key}.lock"):
        shutil.rmtree(folder / key, ignore_errors=True)


def decode_for_now(folder: Path, decode: Callable[[], Chunks]) -> TensorSet:
    """Mapped arrays whose files have no name any more: they go when the arrays do.

    Raises:
        DataError: as in `decode_once`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f".now.{secrets.token_hex(4)}"
        with FileLock(folder / ".now.lock"):
            for left in folder.glob(".now.*/lock"):  # whoever lives holds it
                with suppress(Timeout), FileLock(left, blocking=False):
                    shutil.rmtree(left.parent, ignore_errors=True)
            place.mkdir()
            held = FileLock(place / "lock")
            held.acquire()
        try:
            _write(place, "", decode(), lambda arrays: {})
            return _open(place, "", verify=False).arrays
        finally:
            shutil.rmtree(place, ignore_errors=True)
            held.release()
    except UndecodableError as error:
        raise error.reason from None
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _key(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:24]


def _decoded(chunks: Chunks) -> Iterator[tuple[Tensor, Tensor]]:
    """The chunks; an error of whoever makes them is kept apart from those of our own files."""
    try:
        yield from chunks
    except OSError as error:
        raise UndecodableError(error) from error


def _cannot_write(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache folder {folder} cannot be used: {error.strerror or error}; "
        "name one that can be used with data.loader.folder=FOLDER or data.root=FOLDER (folder=… of make_loader)"
    )


def _write(place: Path, fingerprint: str, chunks: Chunks, annotate: Callable[[TensorSet], dict[str, Any]]) -> None:
    names = ("images", "labels")
    checksums = {name: hashlib.sha256() for name in names}
    forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
    samples = 0
    with (place / "images.bin").open("xb") as images, (place / "labels.bin").open("xb") as labels:
        for chunk in _decoded(chunks):
            for name, file, array in zip(names, (images, labels), chunk, strict=True):
                if str(array.dtype) not in DTYPES:
                    raise DataError(f"{name}: a cache cannot hold {array.dtype}; choose ram or disk")
                form = forms.setdefault(name, (array.shape[1:], array.dtype))
                if form != (array.shape[1:], array.dtype):
                    raise DataError(
                        f"{name} {samples}…: {array.dtype} {list(array.shape[1:])}, but those before are "
                        f"{form[1]} {list(form[0])}; a cache needs samples of one dtype and shape"
                    )
                content = array.contiguous().view(torch.uint8).numpy().data
                file.write(content)
                checksums[name].update(content)
            samples += len(chunk[0])
        for file in (images, labels):
            file.flush()
            os.fsync(file.fileno())
    if not samples:
        raise DataError("there is no sample to decode")
    record: dict[str, Any] = {
        name: {"shape": [samples, *shape], "dtype": str(dtype), "sha256": checksums[name].hexdigest()}
        for name, (shape, dtype) in forms.items()
    }
    arrays = TensorSet(_map(place, "images", record), _map(place, "labels", record), mapped=True)
    record |= {"fingerprint": fingerprint, "notes": annotate(arrays)}
    write_whole(place / "cache.json", json.dumps(record, indent=2).encode())


def _open(place: Path, fingerprint: str, verify: bool) -> Cached:
    """The cache in `place`.

    Raises:
        DamagedError: it is not whole, or of something else.
    """
    try:
        record = json.loads((place / "cache.json").read_text())
        if record["fingerprint"] != fingerprint:
            raise DamagedError("it is of other contents")
        images, labels = _map(place, "images", record), _map(place, "labels", record).clone()
        cached = Cached(TensorSet(images, labels, mapped=True), record["images"]["sha256"], dict(record["notes"]))
        if reading() is not Reading.LATER and (
            digest(labels) != record["labels"]["sha256"] or (verify and digest(images) != cached.sha256)
        ):
            raise DamagedError("its checksum does not match")
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    return cached


def _map(place: Path, name: str, record: dict[str, Any]) -> Tensor:
    path = place / f"{name}.bin"
    shape, dtype = record[name]["shape"], DTYPES[record[name]["dtype"]]
    elements = math.prod(shape)
    size = elements * dtype.itemsize
    if path.stat().st_size != size:
        raise DamagedError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    # Private: whoever writes into a view of it changes his own copy of the page, never the file. Without a reserve,
    # because the kernel would otherwise refuse to map what is larger than memory, and torch.from_file knows no flags.
    with path.open("rb") as file:
        pages = mmap.mmap(
            file.fileno(), size, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return torch.frombuffer(pages, dtype=dtype).view(shape)
