"""The output folder of a run or sweep: its lock, and whether it has a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.errors import ConfigError, ExitCode
from vitmnist.runtime.file_lock import is_held_here, is_locked, try_lock
from vitmnist.runtime.files import display_path

LOCK_NAME = ".lock"
"""The name of the file in the folder of a run or sweep that its process locks."""


class InUseError(ConfigError):
    """The output folder is in use by another process."""

    exit_code = ExitCode.UNFINISHED


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder of a run or sweep if there is none, and lock it within the block.

    The lock is on the file `.lock`, and the file stays. The system releases the lock when this process ends.

    Raises:
        InUseError: another process, or another part of this process, has locked the folder.
        OSError: the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / LOCK_NAME
    if is_held_here(path):
        raise InUseError(f"{display_path(folder)}: in use by this process")
    release = try_lock(path)
    if release is None:
        raise InUseError(f"{display_path(folder)}: in use by another process; wait for it, or stop it")
    try:
        yield
    finally:
        release()


def is_in_use(folder: Path) -> bool:
    """Whether another process has locked a folder, also on a read-only file system."""
    return is_locked(folder.resolve() / LOCK_NAME)


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, complete or not."""
    return any(folder.glob("checkpoints/*.pt"))
