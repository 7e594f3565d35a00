"""Detects other content in the files that a set was decoded from, although their names, sizes and times are the same.

`mv` and archives keep size and modification time, but not the ctime. Where that differs, a digest is compared.
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
STAMP = np.dtype([("ctime_ns", "<i8"), ("digest", "V16")])


class SourceFiles:
    """The files that a set is decoded from, a stat of each (None if it is missing), and their ctimes and digests."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.stats: list[os.stat_result | None] = [None] * len(paths)
        for index, path in enumerate(paths):
            with suppress(OSError):  # a missing file is reported when it is decoded
                self.stats[index] = path.stat()
        self._stamps = np.zeros(len(paths), STAMP)
        self._stamps["ctime_ns"] = [status.st_ctime_ns if status else 0 for status in self.stats]

    def take_digest(self, index: int) -> None:
        """Take the digest of a file, before it is decoded: if it is replaced in between, `verify` fails."""
        self._stamps["digest"][index] = self._digest(index)

    def save(self, folder: Path) -> None:
        """Write ctimes and digests; raises `OSError`."""
        np.save(content := io.BytesIO(), self._stamps)
        write_atomic(folder / STAMPS, content.getvalue())

    def verify(self, stored: NDArray[np.void], folder: Path, may_write: bool = True) -> None:
        """Raise `ValueError` if a file is not that of `stored`, which `folder` has; otherwise save the new ctimes."""
        if stored.dtype != STAMP or len(stored) != len(self.paths):
            raise ValueError(f"{STAMPS} is not what was written")
        if not (rows := np.flatnonzero(stored["ctime_ns"] != self._stamps["ctime_ns"]).tolist()):
            return
        log.info("comparing %d files with what was decoded: their ctime has changed", len(rows))
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
