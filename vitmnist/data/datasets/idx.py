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
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

UINT8 = 0x08  # the IDX code of the only element type in this family


@dataclass(frozen=True)
class IdxFile:
    """An IDX file, packed (`.gz`) or not.

    Args:
        path: an existing file.
        checksum: `sha256:…` or `md5:…` of that file; None if nobody publishes one.
        unpacked: where `unpack` writes the unpacked file, if `path` is packed.
    """

    path: Path
    checksum: str | None
    unpacked: Path

    def read(self) -> Tensor:
        """The verified contents: uint8, of the shape in the header.

        Raises:
            DataError: the file cannot be read, has another checksum, or is not a complete IDX file of bytes.
        """
        return parse_idx(self._content(), self.path)

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
        if self.path.suffix != ".gz":
            return self.path
        content = self._content()
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

    def _content(self) -> bytes:
        """The unpacked bytes; the file is verified before it is unpacked, because it may unpack to any size."""
        try:
            stored = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if self.checksum:
            algorithm, _, expected = self.checksum.partition(":")
            found = hashlib.new(algorithm, stored, usedforsecurity=False).hexdigest()
            if found != expected:
                raise DataError(f"{self.path} is damaged: expected {algorithm} {expected}, found {found}")
        if self.path.suffix != ".gz":
            return stored
        try:
            return gzip.decompress(stored)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} is damaged: {error}") from error


def parse_idx(content: bytes, path: Path) -> Tensor:
    """The tensor in an IDX file of bytes with one to three dimensions: uint8.

    Raises:
        DataError: the header is not IDX, the elements are not bytes, or the length does not match the shape.
    """
    zeros, element_type, dimensions = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    start = 4 + 4 * dimensions
    if zeros != 0 or element_type != UINT8 or dimensions not in (1, 2, 3) or len(content) < start:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    promised = start + math.prod(shape)
    if len(content) != promised:
        raise DataError(f"{path} is damaged: its header promises {promised} bytes, it has {len(content)}")
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
