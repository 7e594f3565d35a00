"""Locks between processes and between threads: `fcntl.lockf`, or `filelock` where Python lacks it.

On a file system without locks, only the threads of a process exclude each other, and a warning is logged.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 0.05
"""The interval at which a waiting thread tries to lock, in seconds."""

_held_locks: set[tuple[int, Path]] = set()
"""The process ID and the path of each held lock. A forked process inherits this set, but not the locks."""
_held_locks_guard = threading.Lock()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file within the block, after waiting until no process or thread holds it; raises `OSError`."""
    while (release := try_lock(path.resolve())) is None:
        time.sleep(POLL_S)
    try:
        yield
    finally:
        release()


def try_lock(path: Path) -> Callable[[], None] | None:
    """Lock a file, creating it if necessary. Return a function that unlocks it, or None if another holder has it.

    The system unlocks the file when this process ends.

    Args:
        path: resolved, because it identifies the file among the threads of this process.

    Raises:
        OSError: the file cannot be created or written to.
    """
    holder = os.getpid(), path
    with _held_locks_guard:
        # The system would grant the same lock to this process again.
        if holder in _held_locks or (unlock := _lock_file(path)) is None:
            return None
        _held_locks.add(holder)

    def release() -> None:
        with _held_locks_guard:
            unlock()
            _held_locks.discard(holder)

    return release


def is_locked(path: Path) -> bool:
    """Whether another process has locked a file, also on a read-only file system; `path` must be resolved."""
    with _held_locks_guard:
        # Closing any handle of a file releases the lock of this process on it.
        if (os.getpid(), path) in _held_locks or not path.is_file():
            return False
        try:
            unlock = _lock_file(path, is_shared=True)
        except OSError:
            # The file system has no locks, or the file belongs to another user.
            return False
        if unlock:
            unlock()
        return unlock is None


try:
    import fcntl
except ImportError:
    from filelock import FileLock, Timeout

    def _lock_file(path: Path, is_shared: bool = False) -> Callable[[], object] | None:
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None

        def unlock() -> None:
            lock.release()
            path.touch()  # On Windows, `filelock` removes the file.

        return unlock

else:

    def _lock_file(path: Path, is_shared: bool = False) -> Callable[[], object] | None:
        with ExitStack() as stack:
            file = stack.enter_context(path.open("rb" if is_shared else "ab"))
            try:
                # Processes inherit a lock of `flock`, so workers that outlive this process would keep it.
                fcntl.lockf(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return None
            except OSError as error:
                if is_shared or error.errno not in (errno.ENOLCK, errno.ENOSYS):
                    raise
                log.warning("%s: this file system has no locks; start only one process at a time here", path.parent)
            return stack.pop_all().close
