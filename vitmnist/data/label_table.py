"""Reads a table of labels: a CSV file with the file, the class and optionally the split of each image."""

import csv
import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitmnist.data.image_listing import SPLIT_OF, SPLITS, ClassifiedFiles, to_nfc
from vitmnist.errors import DataError, join_names

log = logging.getLogger(__name__)


@dataclass
class TableColumns:
    """The names of the columns of a table of labels."""

    file: str = "file"
    label: str = "label"
    split: str = "split"


def read_label_table(
    table: Path, columns: TableColumns, suffix: str, folder: Path, skip_missing: bool
) -> dict[str, ClassifiedFiles]:
    """Return the images of each split; all are below `folder`.

    Args:
        table: the CSV file, in UTF-8.
        columns: the names of its columns. Without a column with the default name `split`, all images are for training.
        suffix: appended to the names of the files.

    Raises:
        DataError: the table cannot be read, a line cannot be used, or there are fewer than two classes to train.
    """
    lines: dict[Path, int] = {}
    splits: dict[str, ClassifiedFiles] = {split: [] for split in SPLITS}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:  # Spreadsheets write a byte order mark.
            rows = csv.DictReader(file)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
            _check_columns(table, columns, rows.fieldnames)
            for row in rows:
                try:
                    path, label, split = _parse_row(row, columns, suffix, folder)
                    if path in lines:
                        raise ValueError(f"{path} is in line {lines[path]} already")
                    if not (skip_missing or path.exists()):
                        raise ValueError(f"there is no file {path}")
                except ValueError as error:
                    raise DataError(f"{table}:{rows.line_num}: {error}") from error
                lines[path] = rows.line_num
                splits[split].append((path, label))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data.dataset.labels={table}: cannot be read: {error}") from error
    if len({label for _, label in splits["train"]}) < 2:
        raise DataError(f"{table}: two or more labels of training images are expected")
    return {split: files for split, files in splits.items() if files}


def _check_columns(table: Path, columns: TableColumns, names: Sequence[str]) -> None:
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"{table}:1: has more than one column {join_names(repeated)}; rename or remove one")
    required = [columns.file, columns.label]
    if columns.split != TableColumns.split:
        required.append(columns.split)
    if missing := [name for name in required if name not in names]:
        problem = f"has no column {' and '.join(missing)}, only {join_names(names) or 'none'}"
        raise DataError(f"{table}:1: {problem}; set data.dataset.columns='{{file: NAME, label: NAME}}'")
    if unused := [repr(name) for name in names if name and name not in (*required, columns.split)]:
        log.warning("%s: columns that are not used: %s", table, join_names(unused))


def _parse_row(row: dict[str, Any], columns: TableColumns, suffix: str, folder: Path) -> tuple[Path, str, str]:
    """Return the file, class and split of a row; raises `ValueError` if the row cannot be used."""
    if None in row:
        raise ValueError("has more fields than the header; quote values with commas")
    name, label = ((row[column] or "").strip() for column in (columns.file, columns.label))
    if not (name and label):
        raise ValueError(f"has no value in the column {columns.label if name else columns.file}")
    spelling = (row.get(columns.split, "train") or "").strip()
    split = SPLIT_OF.get(spelling.lower())
    if not split:
        raise ValueError(f"{columns.split}={spelling}: must be train, val or test")
    name += suffix
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    path = next((folder / form for form in forms if (folder / form).exists()), folder / name)
    if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
        raise ValueError(f"{name}: must be below data.dataset.path={folder}, without '..'")
    return path, to_nfc(label), split
