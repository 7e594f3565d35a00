"""Checksums of decoded samples in a file, compared whenever the samples are read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
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
    """The CRC-32 of each sample in a file of a cache, compared whenever samples are read: disks change bytes silently.

    Args:
        values: uint32 `[N]`.
        entry: the folder of the cache; None if its files have no name.
    """

    values: np.ndarray[Any, Any]
    entry: Path | None

    def __getitem__(self, rows: slice) -> Checksums:
        return replace(self, values=self.values[rows])

    def checked(self, samples: Tensor, rows: slice | Sequence[int] | Tensor = slice(None)) -> Tensor:
        """`samples`, which are those at `rows`; raises `DamagedCacheError` if one is not what was written."""
        at = rows if isinstance(rows, slice) else np.asarray(rows)
        if len(differing := np.flatnonzero(crc32(samples.numpy()) != self.values[at])):
            raise damage(self.entry, np.arange(len(self.values))[at][differing[0]])
        return samples


def damage(entry: Path | None, index: int) -> DamagedCacheError:
    """The error for a sample of a cache; removes the record of the cache, which is not used again."""
    if entry:
        with suppress(OSError):
            (entry / RECORD).unlink()
    return DamagedCacheError(
        f"the cache {entry or 'file'} is damaged: sample {index} is not what was written; start again, and the samples "
        "are decoded again"
    )


def crc32(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The checksum of each sample; takes 0.03 ms for 3×224×224 bytes, 0.6 µs for 28×28."""
    rows: Any = np.ascontiguousarray(samples).reshape(len(samples), math.prod(samples.shape[1:])).view(np.uint8)
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))
