"""Detects files that were replaced since a set was decoded, although their names, sizes and times are the same.

Two files exchanged by `mv`, or restored from an archive, keep size and modification time, but not their ctime. It is
stored with a digest of each file; where a ctime differs, the file is read and its digest compared.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmnist.data.threads import map_in_threads
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.files import is_only_reading, write_atomic

log = logging.getLogger(__name__)

STAMPS = "sources.npy"  # next to the decoded samples
STAMP = np.dtype([("ctime_ns", "<i8"), ("digest", "V16")])


class SourceFiles:
    """The files that a set is decoded from: a stat of each, and stamps to tell later whether one was replaced."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.stats = [_stat(path) for path in paths]  # None for a missing file
        self._stamps = np.zeros(len(paths), STAMP)
        self._stamps["ctime_ns"] = [0 if status is None else status.st_ctime_ns for status in self.stats]

    def take_digest(self, index: int) -> None:
        """Take the digest of a file. Call it before decoding: a file replaced in between then fails `verify`."""
        self._stamps["digest"][index] = self._digest(index)

    def save(self, folder: Path) -> None:
        """Write the stamps; raises `OSError`."""
        np.save(content := io.BytesIO(), self._stamps)
        write_atomic(folder / STAMPS, content.getvalue())

    def verify(self, stored: NDArray[np.void], folder: Path) -> None:
        """Raise `ValueError` if a file has other content than when the set was decoded.

        Reads files whose ctime differs. If their content is the same, the new times are stored, where that is possible.

        Args:
            stored: the stamps in `folder`.
        """
        if stored.dtype != STAMP or stored.shape != self._stamps.shape:
            raise ValueError(f"{STAMPS} is not what was written")
        rows = np.flatnonzero(stored["ctime_ns"] != self._stamps["ctime_ns"]).tolist()
        if not rows:
            return
        log.info("comparing %d files with what was decoded: their ctime has changed", len(rows))
        with closing(map_in_threads(self._digest, rows, available_cores())) as digests:
            for row, digest in zip(rows, digests, strict=True):
                if digest != stored["digest"][row].tobytes():
                    raise ValueError(f"{self.paths[row]} has other content than when it was decoded")
        self._stamps["digest"] = stored["digest"]
        if not is_only_reading():
            with suppress(OSError):  # a folder that cannot be written: the files are compared again next time
                self.save(folder)

    def _digest(self, index: int) -> bytes:
        """16 bytes; zeros if there is no regular file that can be read, which is reported when it is decoded."""
        digest, status = bytes(16), self.stats[index]
        if status is not None and stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for a writer
            with suppress(OSError):
                digest = hashlib.blake2b(self.paths[index].read_bytes(), digest_size=16).digest()
        return digest


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
