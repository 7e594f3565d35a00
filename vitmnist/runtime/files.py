"""Writes files atomically, reads JSON and YAML as plain values, writes CSV, and expands and displays paths."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from vitmnist.errors import first_line

# libyaml is about ten times as fast as the parser in Python. It limits the depth of nesting.
YAML_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Give each `OSError` the name of a file: an error of `write` has none, and a temporary file's name says little."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to a temporary file and rename it: readers and crashes see the old file or the new one.

    A process that is killed leaves its temporary file, which the next one overwrites.

    Args:
        previous: a name for the old file, which a crash between two renames leaves under that name only.

    Raises:
        OSError: with `path` as its filename, not the temporary file.
    """
    # Two processes may write the same report.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming_file(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if previous:
                path.replace(previous)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Append to a file; raises `OSError` with `path` as its filename."""
    with naming_file(path), path.open("ab") as file:
        file.write(content)


def home_expanded(folder: str) -> Path:
    """A folder whose name may begin with `~` or `~USER`; the name as it is if there is no such user."""
    return Path(os.path.expanduser(folder))


def display_path(path: Path | str) -> str:
    """A path as it is shown: relative below the working directory, absolute otherwise."""
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute) if Path(absolute).is_relative_to(Path.cwd()) else absolute


class UnreadableError(ValueError):
    """A file that cannot be used; the message is one line that says why, without the name of the file."""


def read_plain(path: Path) -> object:
    """The plain values in a JSON or YAML file; interpolations such as `${oc.env:HOME}` stay text.

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


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A CSV table of the columns of some rows, with texts in quotes; a missing value and None are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return text.getvalue()
