"""Reads JSON and YAML files of unknown origin within bounds, and writes values of unknown origin as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vitmnist.errors import first_line

JSON_MB, YAML_MB = 4, 1
MAX_DEPTH = 50
# Control characters in JSON text, escaped or not. Tab and line breaks pass: JSON writes them as \t, \n and \r.
CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|[\x7f-\x9f]", re.IGNORECASE)
# libyaml, about ten times as fast as the parser in Python.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(ValueError):
    """A file that cannot be used; the message is one line that says why, without the name of the file."""


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FileNotFoundError: there is none.
        UnreadableError: it is no regular file, too large, nested too deeply, or not JSON.
    """
    text = _read(path, JSON_MB)
    refuse_control_characters(text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadableError("is nested too deeply") from error
    except ValueError as error:
        raise UnreadableError(f"is not JSON: {error}") from error


def read_yaml(path: Path) -> Any:
    """The value in a YAML file; interpolations such as `${oc.env:HOME}` stay text.

    Raises:
        FileNotFoundError: there is none.
        UnreadableError: it is no regular file, too large, nested too deeply, not YAML, or has aliases, tags or dates.
    """
    text = _read(path, YAML_MB)
    try:
        depth = 0
        for event in yaml.parse(text, LOADER):  # before the values are built, which recurses
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                raise UnreadableError("contains a YAML alias or tag")  # a few aliases can stand for billions of values
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UnreadableError("is nested too deeply")
        value = yaml.load(text, LOADER)
        refuse_control_characters(json.dumps(value))  # `dumps` refuses dates and integers of thousands of digits
    except UnreadableError:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UnreadableError(f"is not YAML: {first_line(error)}") from error
    return value


def refuse_control_characters(text: str) -> None:
    """Raise `UnreadableError` if a text of JSON has any in a string: a terminal would obey them."""
    if CONTROL.search(text):
        raise UnreadableError("contains control characters")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV table of the columns of some rows; a missing value and None are empty cells.

    Texts are quoted and numbers are not. A text that a spreadsheet would run as a formula gets an apostrophe in front;
    its line ends become spaces, because what follows one could begin a row.
    """
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    line = " ".join(value.splitlines())
    if not line.lstrip().startswith(("=", "+", "-", "@")):
        return line
    try:
        float(line)
    except ValueError:
        return f"'{line}"
    return line


def _read(path: Path, megabytes: int) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would wait for a writer
            raise UnreadableError("is not a regular file")
        with path.open("rb") as file:
            content = file.read(megabytes * 1_000_000 + 1)
        if len(content) > megabytes * 1_000_000:
            raise UnreadableError(f"is larger than {megabytes} MB")
        return content.decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from error
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not text: {error}") from error
