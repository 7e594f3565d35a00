"""A file in memory that this process and its workers write to, so that samples are neither sent nor copied again."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import Any
from weakref import finalize

import torch
from torch import Tensor


class SharedFile:
    """An unnamed file that disappears with its last user; pickled for a spawned worker, it is the same file.

    Unlike torch's shared memory it does not need room in /dev/shm, which containers often limit to 64 MB, and writing
    to it takes less time than to fresh pages of a mapping, which the system fills with zeros first.
    """

    def __init__(self, descriptor: Any = None) -> None:
        if descriptor:
            self._file: int = descriptor.detach()
        elif hasattr(os, "memfd_create"):
            self._file = os.memfd_create("samples")
        else:
            with TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        finalize(self, os.close, self._file)

    def __reduce__(self) -> Any:
        return SharedFile, (DupFd(self._file),)

    @property
    def nbytes(self) -> int:
        """What has been written."""
        return os.fstat(self._file).st_size

    def append(self, parts: Sequence[Any]) -> int:
        """Append bytes, in one piece even if other processes do too; returns where they begin."""
        size = sum(map(len, parts))
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the system releases it, if a worker is killed
        try:
            start = self.nbytes
            os.ftruncate(self._file, start + size)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        position = start
        for part in parts:
            self._write(position, part)
            position += len(part)
        return start

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Set some rows of the tensor that `tensor` will return."""
        content = rows.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        self._write(first * (len(content) // len(rows)), content)

    def _write(self, start: int, content: Any) -> None:
        view = memoryview(content)
        while view:  # the system may write less than it is asked to
            written = os.pwrite(self._file, view, start)
            start, view = start + written, view[written:]

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] = (-1,)) -> Tensor:
        """What has been written, mapped."""
        if not self.nbytes:
            return torch.empty([max(size, 0) for size in shape], dtype=dtype)
        return torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.uint8).view(dtype).view(*shape)
