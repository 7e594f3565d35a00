"""Reading the IDX files of the MNIST family (http://yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitmnist.errors import DataError

UINT8 = 0x08  # the IDX code of the only element type in this family
MAX_NBYTES = 1 << 30  # unpacked; MNIST's largest file has 47 MB


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """The tensor in an IDX file of bytes, packed (`.gz`) or not: uint8, of the shape in its header.

    Args:
        sha256: of the file; None if unknown.

    Raises:
        DataError: it cannot be read or unpacked, is not a complete IDX file of bytes, or has another SHA-256.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if sha256 and (found := hashlib.sha256(stored).hexdigest()) != sha256:
        raise DataError(f"{path} is damaged: expected sha256 {sha256}, found {found}")
    try:
        file = io.BytesIO(stored)
        return _parse(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}; remove it to download it again") from error


def _parse(file: gzip.GzipFile | io.BytesIO, path: Path) -> Tensor:
    """Read at most as much as the header promises, because a file may unpack to any size."""
    start = file.read(4)
    zeros, element_type, dimensions = struct.unpack(">HBB", start.ljust(4, b"\xff"))
    sides = file.read(4 * dimensions)
    if zeros != 0 or element_type != UINT8 or dimensions not in (1, 2, 3) or len(sides) < 4 * dimensions:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {start.hex(' ') or 'nothing'}")
    shape = struct.unpack(f">{dimensions}I", sides)
    promised = math.prod(shape)
    if promised > MAX_NBYTES:
        raise DataError(f"{path} is damaged: its header promises {promised} bytes")
    # One more, to notice a longer file; reading to the end also compares gzip's own checksum.
    content = bytearray(file.read(promised + 1))
    if len(content) != promised:
        found = "more" if len(content) > promised else len(content)
        raise DataError(f"{path} is damaged: its header promises {promised} bytes after it, there are {found}")
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))
