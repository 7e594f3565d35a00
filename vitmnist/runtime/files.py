"""Writes files atomically, and expands and displays paths."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from vitmnist.errors import ConfigError, printable


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to a temporary file and rename it: readers and crashes see the old file or the new one.

    Args:
        previous: a name for the old file, which a crash between two renames leaves under that name only.

    Raises:
        OSError: with `path` as its filename, not the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # `run_folder` recognises such names
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
    except OSError as error:  # an error of a full device has no filename
        error.filename = str(path)
        raise


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
