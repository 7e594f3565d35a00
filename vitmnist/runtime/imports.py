"""Importing large libraries quickly and safely."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vitmnist.runtime.signals import STOPPING

atexit.register(gc.unfreeze)  # libraries report frozen objects as leaks


def import_large(name: str) -> Any:
    """Import a module that creates many objects, without collecting garbage and without being interrupted.

    Python's collector would examine the new objects again and again, which took 0.7 s of the 3.6 s that torch and its
    first optimizer need. Afterwards they are exempt from collection, since they stay until the process ends.

    A signal waits until the import is complete: an exception raised in the middle of it can make C++ libraries abort.
    """
    if name not in sys.modules:
        gc.disable()
        try:
            with _signals_held():
                import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals that would stop the process until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread
        return
    received: list[int] = []
    # Not blocked: a thread of a library, which blocks none, would receive them, and Python's handler run all the same.
    before = {number: signal.signal(number, lambda found, _: received.append(found)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in received:
            signal.raise_signal(held)
