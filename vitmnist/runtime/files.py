"""Atomic writes, output folders (locks, checkpoints), and paths as they are printed."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from vitmnist.errors import ConfigError


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to a temporary file and rename it: readers and crashes see the old file or the new one.

    Args:
        previous: a name for the old file, which a crash between two renames leaves under that name only.

    Raises:
        OSError: with `path` as its filename, not that of the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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


class ClaimedError(ConfigError):
    """The output folder is in use by another process."""


def claim(folder: Path) -> IO[str]:
    """Lock the folder of a run or sweep until the returned file is closed or this process ends.

    Raises:
        ClaimedError: another process has locked it.
    """
    file = (folder / ".lock").open("a")
    try:
        # lockf and not flock: loader workers would inherit a flock and keep it if they outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ClaimedError(f"{display_path(folder)}: in use by another process; wait for it, or stop it") from error
    return file


def is_claimed(folder: Path) -> bool:
    """Whether another process has locked a folder."""
    try:
        claim(folder).close()
    except (ClaimedError, OSError):
        return True
    return False


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has left a checkpoint in its folder, complete or not."""
    return any(folder.glob("checkpoints/*.pt"))


def display_path(path: Path | str) -> str:
    """A path as it is printed: relative below the working directory, absolute otherwise."""
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute) if Path(absolute).is_relative_to(Path.cwd()) else absolute
