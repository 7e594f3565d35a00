"""Reading, verifying and unpacking the IDX files of the MNIST family (http://yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import gzip
import hashlib
import logging
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitmnist.data.reading import Reading, reading
from vitmnist.errors import DataError
from vitmnist.runtime.files import write_whole

log = logging.getLogger(__name__)

UINT8 = 0x08  # the IDX code of the one element type this family uses


@dataclass(frozen=True)
class IdxFile:
    """An IDX file, packed (`.gz`) or not.

    Args:
        path: the file that exists.
        checksum: `sha256:…` or `md5:…` of that very file; None where nobody publishes one.
        unpacked: where `on_disk` puts the unpacked file, if `path` is packed.
    """

    path: Path
    checksum: str | None
    unpacked: Path

    def read(self) -> Tensor:
        """The array in the file, verified: uint8, of the header's shape.

        Where several processes of a machine read it, it is unpacked once, and all map the same pages, if there is a
        place for it.

        Raises:
            DataError: the file cannot be read, has another checksum, or is not a whole IDX file of bytes.
        """
        if reading() is Reading.ALONE:
            return parse_idx(self._content(), self.path)
        try:
            return _mapped(self._unpacked())
        except OSError as error:
            log.info("%s cannot be unpacked for all processes (%s); each has a copy", self.path.name, error.strerror)
            return parse_idx(self._content(), self.path)

    def on_disk(self) -> Path:
        """The unpacked file, which can be mapped into memory; written first where only the packed one exists.

        Raises:
            DataError: as in `read`, or the folder cannot be written.
        """
        try:
            return self._unpacked()
        except OSError as error:
            raise DataError(
                f"cannot unpack {self.path.name} into {self.unpacked.parent}: {error.strerror}; "
                "name a folder that can be written with data.root=FOLDER"
            ) from error

    def _unpacked(self) -> Path:
        if self.path.suffix != ".gz":
            return self.path
        if reading() is Reading.LATER and self.unpacked.exists():
            return self.unpacked
        content = self._content()
        if self.unpacked.exists():
            if _digest("sha256", self.unpacked.read_bytes()) == _digest("sha256", content):
                return self.unpacked
            log.warning("%s was damaged and is unpacked again from %s", self.unpacked, self.path)
        self.unpacked.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.unpacked, content)
        return self.unpacked

    def _content(self) -> bytes:
        """The unpacked bytes; a file is verified before it is unpacked."""
        try:
            stored = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if self.checksum:
            algorithm, _, expected = self.checksum.partition(":")
            found = _digest(algorithm, stored)
            if found != expected:
                raise DataError(f"{self.path} is damaged: expected {algorithm} {expected}, found {found}")
        if self.path.suffix != ".gz":
            return stored
        try:
            return gzip.decompress(stored)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} is damaged: {error}") from error


def parse_idx(content: bytes, path: Path) -> Tensor:
    """The array of an IDX file of bytes, uint8, of the header's shape.

    Raises:
        DataError: the header is not IDX, the elements are not bytes, or the length does not match the shape.
    """
    shape, start = _form(content[:16], len(content), path)
    # Copied once, because torch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape))


def _mapped(path: Path) -> Tensor:
    """The array of an unpacked file, whose pages all processes share; one that writes into it has its own copy."""
    with path.open("rb") as file:
        shape, start = _form(file.read(16), path.stat().st_size, path)
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=start, shape=shape))


def _form(header: bytes, size: int, path: Path) -> tuple[tuple[int, ...], int]:
    """The shape of the array in a file of `size` bytes, and where it begins."""
    shape = read_shape(header, path)
    start, elements = 4 + 4 * len(shape), math.prod(shape)
    if size != start + elements:
        raise DataError(f"{path} is damaged: its header promises {start + elements} bytes, it has {size}")
    return shape, start


def read_shape(header: bytes, path: Path) -> tuple[int, ...]:
    """The shape in the first 16 bytes of an IDX file of bytes with one to three dimensions.

    Raises:
        DataError: the header is not such a one.
    """
    zeros, element_type, dimensions = struct.unpack(">HBB", header[:4].ljust(4, b"\xff"))
    if zeros != 0 or element_type != UINT8 or dimensions not in (1, 2, 3) or len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {header[:4].hex(' ') or 'nothing'}")
    return struct.unpack_from(f">{dimensions}I", header, 4)


def _digest(algorithm: str, content: bytes) -> str:
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
