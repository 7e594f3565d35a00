"""Reads JSON and YAML files as plain values, and writes CSV tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vitmnist.errors import first_line

MAX_JSON_MB, MAX_YAML_MB = 4, 1
# libyaml is about ten times as fast as the parser in Python. It limits the depth of nesting.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(ValueError):
    """A file that cannot be used; the message is one line that says why, without the name of the file."""


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is too large, or not JSON.
    """
    try:
        return json.loads(_read(path, MAX_JSON_MB))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableError(f"is not JSON: {error}") from error


def read_yaml(path: Path) -> Any:
    """The value in a YAML file; interpolations such as `${oc.env:HOME}` stay text.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is too large, or not YAML of plain values.
    """
    text = _read(path, MAX_YAML_MB)
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as the 13th month
        raise UnreadableError(f"is not YAML: {first_line(error)}") from error


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV table of the columns of some rows, with texts in quotes; a missing value and None are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return text.getvalue()


def _read(path: Path, megabytes: int) -> str:
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            raise FileNotFoundError(f"{path}: there is no such file")
        with path.open("rb") as file:
            content = file.read(megabytes * 1_000_000 + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    if len(content) > megabytes * 1_000_000:
        raise UnreadableError(f"is larger than {megabytes} MB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not text: {error}") from error
