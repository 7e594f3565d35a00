"""Atomic writes, output folders (locks, checkpoints), and paths as they are printed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from vitmnist.errors import ConfigError, ExitCode, printable

log = logging.getLogger(__name__)


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to a temporary file and rename it: readers and crashes see the old file or the new one.

    Args:
        previous: a name for the old file, which a crash between two renames leaves under that name only.

    Raises:
        OSError: with `path` as its filename, not that of the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # as _remove_unfinished expects it
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if previous:
            path.replace(previous)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write a file that a user has named, which may be a device or a pipe: a rename would replace it by a file.

    Raises:
        OSError: with `path` as its filename.
    """
    if not path.exists() or path.is_file():
        write_atomic(path, content)
        return
    try:
        path.write_bytes(content)
    except OSError as error:  # of a full device it has none
        error.filename = str(path)
        raise


def _remove_unfinished(folder: Path) -> None:
    """Remove temporary files from a run or sweep that processes left when they were killed in `write_atomic`."""
    for part in (folder, folder / ".hydra", folder / "checkpoints"):
        for temporary in part.glob(f".*.{8 * '[0-9a-f]'}"):
            temporary.unlink(missing_ok=True)


class InUseError(ConfigError):
    """The output folder is in use by another process."""

    exit_code = ExitCode.UNFINISHED


_locked: set[Path] = set()  # the folders that this process has locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of a run or sweep if there is none, and keep other processes out of it.

    The lock is the file `.lock`, which stays. It is released at the end of the block, or when this process ends.

    Raises:
        ConfigError: a log in it is a link.
        InUseError: another process has locked it, or another part of this one.
        OSError: it cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for appended in folder.rglob("*.log"):  # in the folder of a sweep also those of its jobs
        if appended.is_symlink() and "wandb" not in appended.relative_to(folder).parts:  # which links its own logs
            raise ConfigError(f"{display_path(appended)}: is a symbolic link; replace it by what it points to")
    path = folder.resolve()
    if path in _locked:  # the system would grant this process its lock again
        raise InUseError(f"{display_path(folder)}: in use by this process")
    file = (path / ".lock").open("a")
    try:
        if not _try_lock(file, folder):
            raise InUseError(f"{display_path(folder)}: in use by another process; wait for it, or stop it")
        _locked.add(path)
        _remove_unfinished(path)
        yield
    finally:
        _locked.discard(path)
        with suppress(OSError):  # of a network folder that is gone; nothing was written to it
            file.close()


def _try_lock(file: TextIO, folder: Path) -> bool:
    for _ in range(3):
        try:
            # lockf and not flock: workers would inherit a flock, and keep it if they outlive this process.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            time.sleep(0.02)  # `is_in_use` of another process holds a lock for a moment
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS):
                raise
            log.warning("%s: this file system has no locks; start only one run at a time in this folder", folder)
            return True
    return False


def is_in_use(folder: Path) -> bool:
    """Whether another process has locked a folder. Only reads, so it also works on a read-only file system."""
    path = folder.resolve() / ".lock"
    if path.parent in _locked or not path.is_file():  # closing any handle of our own file releases its lock
        return False
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here, or a foreign file
        return False
    return False


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has left a checkpoint in its folder, complete or not."""
    return any(folder.glob("checkpoints/*.pt"))


def home_expanded(folder: str) -> Path:
    """A folder whose name may begin with `~` or `~USER`; raises `ConfigError` if there is no such user."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{folder}: there is no such user; type the full name of a folder") from error


def display_path(path: Path | str) -> str:
    """A path as it is printed: relative below the working directory, absolute otherwise; no control characters."""
    absolute = os.path.abspath(path)
    return printable(os.path.relpath(absolute) if Path(absolute).is_relative_to(Path.cwd()) else absolute)
