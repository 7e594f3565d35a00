"""Importing large libraries quickly and safely."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
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
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        gc.disable()
        try:
            import_module(name)
        finally:
            gc.freeze()
            gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return sys.modules[name]
