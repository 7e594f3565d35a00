"""The output folder of a run or sweep: its lock, and whether it has a checkpoint."""

import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vitmnist.errors import ConfigError, ExitCode
from vitmnist.runtime.files import display_path

log = logging.getLogger(__name__)


class InUseError(ConfigError):
    """The output folder is in use by another process."""

    exit_code = ExitCode.UNFINISHED


_locked_folders: set[Path] = set()
"""The folders that this process has locked."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create the folder of a run or sweep if there is none, and lock it within the block.

    The lock is on the file `.lock`, and the file stays. The system releases the lock when this process ends.

    Raises:
        InUseError: another process, or another part of this process, has locked the folder.
        OSError: the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve()
    # The system would grant this process its own lock again.
    if path in _locked_folders:
        raise InUseError(f"{display_path(folder)}: in use by this process")
    file = (path / ".lock").open("a")
    try:
        if not _try_lock(file, folder):
            raise InUseError(f"{display_path(folder)}: in use by another process; wait for it, or stop it")
        _locked_folders.add(path)
        yield
    finally:
        _locked_folders.discard(path)
        file.close()


def _try_lock(file: TextIO, folder: Path) -> bool:
    for _ in range(3):
        try:
            # Processes inherit a lock of `flock`, so workers that outlive this process would keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            # Another process can hold the lock for a moment in `is_in_use`.
            time.sleep(0.02)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS):
                raise
            log.warning("%s: this file system has no locks; start only one run at a time in this folder", folder)
            return True
    return False


def is_in_use(folder: Path) -> bool:
    """Whether another process has locked a folder, also on a read-only file system."""
    path = folder.resolve() / ".lock"
    # Closing any handle of a file releases the lock of this process on it.
    if path.parent in _locked_folders or not path.is_file():
        return False
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The file system has no locks, or the file belongs to another user.
        return False
    return False


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, complete or not."""
    return any(folder.glob("checkpoints/*.pt"))
