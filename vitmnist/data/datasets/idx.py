"""Reading, verifying and unpacking the IDX files of the MNIST family (http://yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

UINT8 = 0x08  # the IDX code of the only element type in this family
HEADER_NBYTES = 16  # at most: 4, and 4 for each of three dimensions
MAX_NBYTES = 1 << 30  # unpacked; MNIST's largest file has 47 MB


@dataclass(frozen=True)
class IdxFile:
    """An IDX file, packed (`.gz`) or not.

    Args:
        path: an existing file.
        checksum: published `sha256:…` or `md5:…` of that file; None if there is none.
        unpacked: where `unpack` writes the unpacked file, if `path` is packed.
        content_sha256: of the unpacked bytes; None if unknown.
    """

    path: Path
    checksum: str | None
    unpacked: Path
    content_sha256: str | None = None

    def read(self) -> Tensor:
        """The contents: uint8, of the shape in the header; logs whether they are verified.

        Content that is complete but unknown is used, with a warning: many sets have the format of MNIST.

        Raises:
            DataError: the file cannot be read or unpacked, or is not a complete IDX file of bytes.
        """
        stored = self._stored()
        content = self._unpacked(stored)
        tensor = parse_idx(content, self.path)
        if self._difference(stored) or (self.content_sha256 and not self.checksum):
            sha256 = hashlib.sha256(content).hexdigest()
            if sha256 != self.content_sha256:
                log.warning("%s: content unknown, sha256 %s; it is used as it is", self.path, sha256)
            else:
                log.info("%s: %scontent verified", self.path, "compressed by someone else, " if self._is_packed else "")
        return tensor

    def stamp(self) -> tuple[int, ...]:
        """Changes when the file changes.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        return stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size, stat.st_ino

    def unpack(self) -> Path:
        """The unpacked file, which can be memory-mapped; written first if it is missing or damaged.

        Raises:
            DataError: as in `read`, or the folder cannot be written.
        """
        if not self._is_packed:
            return self.path
        content = self._unpacked(self._stored())
        try:
            if self.unpacked.exists():
                if self.unpacked.read_bytes() == content:
                    return self.unpacked
                log.warning("%s was damaged and is unpacked again from %s", self.unpacked, self.path)
            self.unpacked.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.unpacked, content)
        except OSError as error:
            raise DataError(
                f"cannot unpack {self.path.name} into {self.unpacked.parent}: {error.strerror}; "
                "name a folder that can be written with data.root=FOLDER"
            ) from error
        return self.unpacked

    def _stored(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    @property
    def _is_packed(self) -> bool:
        return self.path.suffix == ".gz"

    def _difference(self, stored: bytes) -> str | None:
        """How the file differs from the published checksum; None if it does not, or none is published."""
        algorithm, _, expected = (self.checksum or "").partition(":")
        found = hashlib.new(algorithm, stored, usedforsecurity=False).hexdigest() if algorithm else expected
        return f"expected {algorithm} {expected}, found {found}" if found != expected else None

    def _unpacked(self, stored: bytes) -> bytes:
        """The unpacked bytes; at most as many as their header promises, because a file may unpack to any size."""
        if not self._is_packed:
            return stored
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(stored)) as packed:
                header = packed.read(HEADER_NBYTES)
                start, shape = parse_header(header, self.path)
                size = start + math.prod(shape)
                if size > MAX_NBYTES:
                    raise DataError(f"{self.path} is damaged: its header promises {size} bytes")
                # One more, to notice a longer file; reading past the end also compares gzip's own checksum.
                return header + packed.read(max(size + 1 - len(header), 0))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} is damaged: {self._difference(stored) or error}") from error


def parse_header(content: bytes, path: Path) -> tuple[int, tuple[int, ...]]:
    """Where the elements of an IDX file of bytes with one to three dimensions begin, and their shape.

    Raises:
        DataError: the header is not IDX, or the elements are not bytes.
    """
    zeros, element_type, dimensions = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    start = 4 + 4 * dimensions
    if zeros != 0 or element_type != UINT8 or dimensions not in (1, 2, 3) or len(content) < start:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
    return start, struct.unpack_from(f">{dimensions}I", content, 4)


def parse_idx(content: bytes, path: Path) -> Tensor:
    """The tensor in an IDX file of bytes: uint8.

    Raises:
        DataError: as `parse_header`, or the length does not match the shape.
    """
    start, shape = parse_header(content, path)
    promised = start + math.prod(shape)
    if len(content) != promised:
        found = "more" if len(content) > promised else len(content)  # of a longer archive the rest was not unpacked
        raise DataError(f"{path} is damaged: its header promises {promised} bytes, it has {found}")
    # Copied once, because torch wants writable memory.
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape))


class IdxImageReader:
    """Reads image i of an IDX file of `shape` [N, H, W] through a memory map; unpacks the file first if necessary."""

    def __init__(self, file: IdxFile, shape: tuple[int, ...]) -> None:
        self.path, self._shape = file.unpack(), shape
        self._pixels: np.memmap | None = None

    def __getitem__(self, index: int) -> Image.Image:
        # Mapped on first use, by the process that reads: a map sent to a worker would arrive as a copy of the file.
        if self._pixels is None:
            self._pixels = np.memmap(self.path, np.uint8, "r", offset=4 + 4 * len(self._shape), shape=self._shape)
        return Image.fromarray(self._pixels[index])
