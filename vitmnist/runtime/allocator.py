"""glibc's allocator: keeps freed memory for the next batch or step, and returns it to the system at the end."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from malloc.h
VARIABLE = "VITMNIST_KEEP_MEMORY"
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")

_lock = threading.Lock()
_users = 0  # open context managers, and living objects of `keep_memory_for`


def trim_heap() -> None:
    """Return freed memory to the system; does nothing with another C library."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def keep_memory() -> Iterator[None]:
    """Keep freed memory in the process, so that the next batch or step on the CPU reuses it.

    By default glibc returns large blocks to the system, which hands them out again page by page, zeroed: always above
    32 MiB, smaller ones depending on the layout of the heap. At batch size 5000, these are 300,000 page faults and 40%
    of a training step of the articles' model.

    It applies to the whole process, and may be nested. On leaving the last one, the memory is returned, and glibc's
    thresholds become the largest that it would choose itself. Does nothing with another C library, with
    `VITMNIST_KEEP_MEMORY=0`, or if an environment variable sets these thresholds.
    """
    release = _keep()
    try:
        yield
    finally:
        release()


def keep_memory_for(owner: object) -> Callable[[], object]:
    """`keep_memory` until `owner` is collected, or the returned function is called."""
    return weakref.finalize(owner, _keep())


def _keep() -> Callable[[], None]:
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users == 1 and not _is_set_by_environment():
            _mallopt({M_TRIM_THRESHOLD: -1, M_MMAP_MAX: 0})
    return _release


def _release() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if not _users and not _is_set_by_environment():
            _mallopt({M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20})
            trim_heap()


def _is_set_by_environment() -> bool:
    return os.environ.get(VARIABLE) == "0" or any(name in os.environ for name in OWN_SETTINGS)


def _mallopt(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    for parameter, value in values.items():
        mallopt(parameter, value)
