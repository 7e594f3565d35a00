"""Detects other content in the files that a set was decoded from, although their names, sizes and times are the same.

`mv` and archives keep size and modification time, but not the ctime, or for a folder or the target of a link not the
inode. Where one of these differs, a digest is compared.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmnist.errors import printable
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.files import write_atomic
from vitmnist.runtime.ordered_map import ordered_map

log = logging.getLogger(__name__)

STAMPS = "sources.npy"  # next to the decoded samples
IDENTITY = ["ctime_ns", "device", "inode"]  # files that are unpacked together often have the same ctime
STAMP = np.dtype([("ctime_ns", "<i8"), ("device", "<u8"), ("inode", "<u8"), ("digest", "V16")])


class SourceFiles:
    """The files that a set is decoded from, a stat of each (None if it is missing), their identities and digests."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.stats: list[os.stat_result | None] = [None] * len(paths)
        self._stamps = np.zeros(len(paths), STAMP)
        for index, path in enumerate(paths):
            with suppress(OSError):  # a missing file is reported when it is decoded
                self.stats[index] = status = path.stat()
                inode = status.st_ino % 2**64  # of 128 bits on some disks of Windows
                self._stamps[index] = status.st_ctime_ns, status.st_dev % 2**64, inode, bytes(16)
        self._is_announced = False

    def take_digest(self, index: int) -> None:
        """Take the digest of a file, before it is decoded: if it is replaced in between, `verify` fails."""
        self._stamps["digest"][index] = self._digest(index)

    def save(self, folder: Path) -> None:
        """Write identities and digests; raises `OSError`."""
        np.save(content := io.BytesIO(), self._stamps)
        write_atomic(folder / STAMPS, content.getvalue())

    def verify(self, stored: NDArray[np.void], folder: Path, may_write: bool = True) -> None:
        """Raise `ValueError` if a file is not that of `stored`, which `folder` has; else save the new identities."""
        if stored.dtype != STAMP or len(stored) != len(self.paths):
            raise ValueError(f"{STAMPS} is not what was written")
        if not (rows := np.flatnonzero(stored[IDENTITY] != self._stamps[IDENTITY]).tolist()):
            return
        if not self._is_announced:  # a stale copy is verified once more, under its lock
            log.info("comparing %d files with what was decoded: their ctime or inode has changed", len(rows))
        self._is_announced = True
        with closing(ordered_map(self._digest, rows, available_cores(), 2 * available_cores())) as digests:
            for row, digest in zip(rows, digests, strict=True):
                if digest != stored["digest"][row].tobytes():
                    raise ValueError(f"{printable(self.paths[row])} has other content than when it was decoded")
        self._stamps["digest"] = stored["digest"]
        if may_write:
            with suppress(OSError):  # a folder that cannot be written: the files are compared again next time
                self.save(folder)

    def _digest(self, index: int) -> bytes:
        """16 bytes; zeros for a file that cannot be read, which decoding reports."""
        with suppress(OSError):
            if self.paths[index].is_file():  # opening a FIFO would wait for a writer
                return hashlib.blake2b(self.paths[index].read_bytes(), digest_size=16).digest()
        return bytes(16)
