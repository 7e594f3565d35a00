"""Samples decoded once into memory-mapped files, for sets that are slow to decode or larger than memory.

FOLDER/KEY/images.bin   the samples one after another, as their dtype is stored in memory
FOLDER/KEY/labels.bin   their labels
FOLDER/KEY/cache.json   shapes, dtypes, checksums and the caller's notes; written last
FOLDER/KEY.lock         held by the process that decodes, while others wait
FOLDER/.KEY.unfinished  the same files while they are written; journal.jsonl has a line per chunk, to resume from
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol, TypeVar

from filelock import FileLock, Timeout
from torch import Tensor

from vitmnist.data.tensor_files import DamagedError, TensorWriter, map_file, seal, unseal
from vitmnist.data.tensors import TensorSet, digest
from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
Chunk = TypeVar("Chunk")

Chunks = Iterable[tuple[Tensor, Tensor]]
"""Images `[B, …]` and labels `[B, …]` of consecutive samples."""

ResumableChunks = Iterable[tuple[Tensor, Tensor, Any]]
"""The same with plain values that are kept with each chunk; one with None is not resumed from."""


@dataclass(frozen=True)
class CacheEntry:
    """The contents of a cache: mapped images and labels in memory, the images' SHA-256, and the caller's notes."""

    tensors: TensorSet
    sha256: str
    notes: dict[str, Any]


class Decoder(Protocol):
    """Decodes the samples of a cache."""

    def chunks(self, finished: list[Any]) -> ResumableChunks:
        """The samples that follow those of an interrupted decoding, whose chunks have left the values `finished`."""

    def notes(self, tensors: TensorSet) -> dict[str, Any]:
        """Plain values to keep with all decoded tensors."""

    def is_current(self, notes: Any) -> bool:
        """Whether samples with these values, of a chunk or of all, need not be decoded again."""


@dataclass(frozen=True)
class PlainDecoder:
    """Decodes by a function, always from the beginning."""

    decode: Callable[[], Chunks]

    def chunks(self, finished: list[Any]) -> ResumableChunks:
        """See `Decoder`."""
        return ((images, labels, None) for images, labels in self.decode())

    def notes(self, tensors: TensorSet) -> dict[str, Any]:
        """See `Decoder`."""
        return {}

    def is_current(self, notes: Any) -> bool:
        """See `Decoder`."""
        return True


class DecodingError(Exception):
    """An `OSError` of the samples, kept apart from those of the cache's own files."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def decode_once(folder: Path, fingerprint: str, decode: Callable[[], Chunks], verify: bool = True) -> CacheEntry:
    """The cache of `fingerprint` in `folder`, for which `decode` yields all samples; see `decode_resumably`."""
    return decode_resumably(folder, fingerprint, PlainDecoder(decode), verify)


def decode_resumably(folder: Path, fingerprint: str, decoder: Decoder, verify: bool = True) -> CacheEntry:
    """The cache of `fingerprint` in `folder`; if it is missing or damaged, one process decodes while others wait.

    Args:
        fingerprint: identifies the contents; other contents need another one.
        verify: compare the images with their checksum, which reads them all; everything else is always compared.

    Raises:
        DataError: the folder cannot be written, or there are no samples.
    """
    key = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    place = folder / key
    try:
        return _open(place, fingerprint, decoder, verify)
    except DamagedError as damage:
        log.debug("%s: %s", place, damage)  # perhaps another process is replacing it: checked again under the lock
    with _named_errors(folder), _locked(_existing(folder) / f"{key}.lock"):
        if place.is_dir():
            try:
                return _open(place, fingerprint, decoder, verify)
            except DamagedError as damage:
                log.warning("the cache %s cannot be used (%s) and is decoded again", place, damage)
        log.info("decoding once into %s", place)
        unfinished = folder / f".{key}.unfinished"
        _remove(folder, key, keep=unfinished)  # left by a process that was killed: a living one would hold the lock
        unfinished.mkdir(exist_ok=True)
        try:
            record = _write(unfinished, decoder) | {"fingerprint": fingerprint}
            write_atomic(unfinished / "cache.json", json.dumps(seal(record), indent=2).encode())
            if place.exists():
                place.rename(folder / f".{key}.damaged")
            unfinished.rename(place)
            (place / JOURNAL).unlink()
        finally:
            _remove(folder, key, keep=unfinished if _has_journal(unfinished) else None)
        return _open(place, fingerprint, decoder, verify=False)


def decode_temporarily(folder: Path, decode: Callable[[], Chunks]) -> TensorSet:
    """Mapped tensors in unnamed files, which disappear with the tensors or the process.

    Raises:
        DataError: as in `decode_once`.
    """
    with _named_errors(folder), TemporaryFile(dir=_existing(folder)) as images, TemporaryFile(dir=folder) as labels:
        writer = TensorWriter(images, labels)
        for chunk in _decoded(decode()):
            writer.append(*chunk)
        return writer.tensors()


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the cache's files into a `DataError` that says what to change."""
    try:
        yield
    except DecodingError as error:
        raise error.reason from None
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be used: {error}; mend this, or name one that can be used with "
            "data.loader.folder=FOLDER or data.root=FOLDER (folder=… of make_loader)"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process, which decodes the same samples (%s)", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove(folder: Path, key: str, keep: Path | None) -> None:
    for left in folder.glob(f".{key}.*"):
        if left != keep:
            shutil.rmtree(left, ignore_errors=True)


def _has_journal(unfinished: Path) -> bool:
    """Whether a decoding can be resumed."""
    journal = unfinished / JOURNAL
    return journal.exists() and journal.stat().st_size > 0


def _write(folder: Path, decoder: Decoder) -> dict[str, Any]:
    """Write the files of a cache, or the rest of them; the contents of `cache.json`."""
    with ExitStack() as stack:
        files = [stack.enter_context(_open_to_update(folder / name)) for name in ("images.bin", "labels.bin", JOURNAL)]
        images, labels, journal = files
        writer = TensorWriter(images, labels)
        finished = writer.resume(journal, decoder.is_current)
        chunks = stack.enter_context(closing(_decoded(decoder.chunks(finished))))
        for *tensors, notes in chunks:
            writer.append(*tensors)
            if notes is not None:
                writer.log(journal, notes)
        decoded = writer.tensors()
        for file in files:
            os.fsync(file.fileno())
        return {**writer.record, "notes": decoder.notes(decoded)}


def _open_to_update(path: Path) -> IO[bytes]:
    path.touch()
    return path.open("r+b")


def _decoded(chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
    try:
        yield from chunks
    except OSError as error:
        raise DecodingError(error) from error


def _open(place: Path, fingerprint: str, decoder: Decoder, verify: bool) -> CacheEntry:
    """The cache in `place`.

    Raises:
        DamagedError: it is missing, incomplete, of other contents, or not current.
    """
    try:
        record = unseal(json.loads((place / "cache.json").read_text()))
        if record["fingerprint"] != fingerprint:
            raise DamagedError("it is of other contents")
        if not decoder.is_current(record["notes"]):
            raise DamagedError("samples that could not be read can be read now")
        with (place / "images.bin").open("rb") as images_file, (place / "labels.bin").open("rb") as labels_file:
            images, labels = map_file(images_file, record["images"]), map_file(labels_file, record["labels"]).clone()
        entry = CacheEntry(TensorSet(images, labels, mapped=True), record["images"]["sha256"], dict(record["notes"]))
        if digest(labels) != record["labels"]["sha256"] or (verify and digest(images) != entry.sha256):
            raise DamagedError("its checksum does not match")
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    return entry
