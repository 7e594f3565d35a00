"""Checksums of the samples in a file, compared whenever samples are read: disks change bytes silently."""

from __future__ import annotations

import math
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitmnist.errors import DataError

RECORD = "cache.json"  # of a cache; without it, the samples are decoded again


class DamagedCacheError(DataError):
    """A sample is not what was written; it is decoded again when the cache is next opened."""


@dataclass(frozen=True)
class Checksums:
    """The CRC-32 of each row of a file.

    Args:
        values: uint32 `[N]`.
        entry: the folder of the cache; None if its files have no name.
    """

    values: np.ndarray[Any, Any]
    entry: Path | None

    def __getitem__(self, rows: slice) -> Checksums:
        return replace(self, values=self.values[rows])

    def verify(self, samples: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """Raise `DamagedCacheError` if one of `samples`, which are those at `rows`, is not what was written."""
        at = rows if isinstance(rows, slice) else np.asarray(rows)
        if len(differing := np.flatnonzero(crc32(samples.numpy()) != self.values[at])):
            raise self.damage(np.arange(len(self.values))[at][differing[0]])

    def damage(self, index: int) -> DamagedCacheError:
        """The error for a damaged sample; removes the record of the cache, which is not used again."""
        if self.entry:
            with suppress(OSError):
                (self.entry / RECORD).unlink()
        return DamagedCacheError(
            f"the cache {self.entry or 'file'} is damaged: sample {index} is not what was written; start again, and "
            "the samples are decoded again"
        )


def crc32(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The checksum of each sample; takes 0.03 ms for 3×224×224 bytes, 0.6 µs for 28×28."""
    rows: Any = np.ascontiguousarray(samples).reshape(len(samples), math.prod(samples.shape[1:])).view(np.uint8)
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))
