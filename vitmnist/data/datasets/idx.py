"""Reads the IDX files of the MNIST family (http://yann.lecun.com/exdb/mnist)."""

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
        if sha256 and (found := hashlib.sha256(stored).hexdigest()) != sha256:
            raise ValueError(f"expected sha256 {sha256}, found {found}")
        file = io.BytesIO(stored)
        return _parse(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is damaged or no IDX file of bytes: {error}") from error


def _parse(file: gzip.GzipFile | io.BytesIO) -> Tensor:
    """Read at most as much as the header promises, because a file may unpack to any size."""
    zeros, element_type, dimensions = struct.unpack(">HBB", file.read(4))
    if zeros != 0 or element_type != UINT8 or dimensions not in (1, 2, 3):
        raise ValueError(f"its header begins with {zeros}, {element_type}, {dimensions}")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    size = math.prod(shape)
    # One more, to notice a longer file; reading to the end also compares gzip's own checksum.
    content = bytearray(file.read(size + 1)) if size <= MAX_NBYTES else b""
    if len(content) != size:
        raise ValueError(f"its header promises {size} bytes after it, and there are more or fewer")
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))
