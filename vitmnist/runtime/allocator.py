"""glibc's allocator: keeping freed memory for the next step, and giving it back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def _give_back() -> None:
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, memory that is freed stays with the process, and the next step finds it there.

    glibc gives large blocks back to the system, which hands them out again page by page, filled with zeros: on the CPU
    300,000 page faults and 40% of a step with 5,000 images at once, and with 500 as many as the layout of the heap
    happens to make, up to 10%. Afterwards all is given back, and glibc's thresholds are the largest that it chooses by
    itself. They are the whole process's; under another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    mallopt(M_TRIM_THRESHOLD, -1)
    mallopt(M_MMAP_MAX, 0)
    try:
        yield
    finally:
        mallopt(M_MMAP_MAX, 65536)
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 64 * 2**20)
        _give_back()
