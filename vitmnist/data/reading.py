"""Files that several processes of one machine read: one verifies and unpacks them, the others take what it left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Reading(Enum):
    """Whether other processes of this machine read the same files, and have done so."""

    ALONE = "nobody else reads them"
    FIRST = "others will read them, so what is unpacked is left for them"
    LATER = "another process has verified and unpacked them a moment ago"


_reading: ContextVar[Reading] = ContextVar("reading", default=Reading.ALONE)


def reading() -> Reading:
    """How files are read now."""
    return _reading.get()


@contextmanager
def read_as(how: Reading) -> Iterator[None]:
    """Within, files are read so."""
    token = _reading.set(how)
    try:
        yield
    finally:
        _reading.reset(token)
