"""Writes files atomically, reads JSON and YAML as plain values, writes CSV, and displays paths."""

import csv
import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from vitmnist.errors import first_line

RENAME_S = 1.0
"""The longest time to wait for a file that another process has open, in seconds."""
YAML_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml if it is available: about ten times as fast as the Python parser, but with limited nesting."""


@contextmanager
def attach_filename(path: Path) -> Iterator[None]:
    """Set the file name of each `OSError` in the block: some have none, and others name a temporary file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to a temporary file and rename it: readers see either the old file or the new one.

    Args:
        previous: the path to which the old file is renamed first. After a crash between the two renames, the old file
            exists under this name only.

    Raises:
        OSError: `path` cannot be written; its `filename` is `path`.
    """
    # The process ID avoids a collision if two processes write the same report.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with attach_filename(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if previous:
                rename(path, previous)
            rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, and replace the file `target` if it exists.

    Windows refuses this while another process, such as `vitmnist status` or a virus scanner, has the file open, so this
    function then tries again for up to a second.
    """
    deadline = time.monotonic() + RENAME_S
    while True:
        try:
            source.replace(target)
            return
        except PermissionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RENAME_S / 100)


def display_path(path: Path | str) -> str:
    """Format a path for messages: relative below the working directory, absolute otherwise, with slashes."""
    absolute = Path(os.path.abspath(path))
    # Shells and Hydra's grammar accept slashes, on Windows too. Backslashes would need quotes.
    return (absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute).as_posix()


class UnreadableError(ValueError):
    """A file cannot be used. The message is one line with the reason, and does not name the file."""


def read_json_or_yaml(path: Path) -> object:
    """Read the plain values in a JSON or YAML file; interpolations such as `${oc.env:HOME}` stay text.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it cannot be read, or does not hold plain values.
    """
    try:
        content = path.read_bytes()
        return json.loads(content) if path.suffix == ".json" else yaml.load(content, YAML_LOADER)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UnreadableError(f"is not {path.suffix[1:].upper()}: {first_line(error)}") from error


def encode_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Format a CSV table with text in quotes; the cells of missing values and of None are empty."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return text.getvalue()
