"""Files that are whole or not there."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from vitmnist.errors import ConfigError


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, flush, rename: a reader or a crash never finds half a file, and the old one stays until then.

    Raises:
        OSError: it cannot be written; names `path`, not the file beside it.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


class ClaimedError(ConfigError):
    """A folder that another process is at work in; nothing of it may be touched."""


def claim(folder: Path) -> IO[str]:
    """Keep other processes out of a run's or sweep's folder until the returned file is closed, or this process ends.

    Raises:
        ClaimedError: another one is at work there.
    """
    file = (folder / ".lock").open("a")
    try:
        # Of this process alone: a lock of the other kind would live on in workers for as long as they do.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ClaimedError(f"{folder}: another process is at work there; wait for it, or stop it") from error
    return file


def is_claimed(folder: Path) -> bool:
    """Whether another process is at work in a run's or sweep's folder."""
    try:
        claim(folder).close()
    except (ConfigError, OSError):
        return True
    return False
