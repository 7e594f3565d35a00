"""Finds threads and processes that something has left behind."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from multiprocessing.process import BaseProcess

Running = threading.Thread | BaseProcess

GRACE_S = 5.0  # threads and processes end within a second; a busy machine may need more


def running() -> set[Running]:
    """The threads of this process, and the processes that it has started with `multiprocessing`."""
    return {*threading.enumerate(), *multiprocessing.active_children()}


def left_since(before: set[Running]) -> list[str]:
    """Names of the threads and processes that have started since `before` and do not end within `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    while (left := running() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return sorted(f"{'thread' if isinstance(one, threading.Thread) else 'process'} {one.name}" for one in left)
