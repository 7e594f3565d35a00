"""Reads a table of labels: a CSV file with the file and the class of each image, and optionally its split and fold."""

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
    fold: str | None = "fold"


def read_label_table(
    table: Path, columns: TableColumns, suffix: str, folder: Path, skip_missing: bool
) -> tuple[dict[str, ClassifiedFiles], dict[str, int]]:
    """Return the images of each split, and the fold of each image by its path relative to `folder`.

    Args:
        table: the CSV file, in UTF-8.
        columns: the names of its columns. Without a column with the default name `split`, all images are for training.
        suffix: appended to the names of the files.

    Raises:
        DataError: the table cannot be read, a line cannot be used, or there are fewer than two classes to train.
    """
    lines: dict[Path, int] = {}
    splits: dict[str, ClassifiedFiles] = {split: [] for split in SPLITS}
    folds: dict[str, int] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:  # Spreadsheets write a byte order mark.
            rows = csv.DictReader(file)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
            _check_columns(table, columns, rows.fieldnames)
            for row in rows:
                try:
                    path, label, split, fold = _parse_row(row, columns, suffix, folder)
                    if path in lines:
                        raise ValueError(f"{path} is in line {lines[path]} already")
                    if not (skip_missing or path.exists()):
                        raise ValueError(f"there is no file {path}")
                except ValueError as error:
                    raise DataError(f"{table}:{rows.line_num}: {error}") from error
                lines[path] = rows.line_num
                splits[split].append((path, label))
                if fold:
                    folds[path.relative_to(folder).as_posix()] = int(fold)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data.dataset.labels={table}: cannot be read: {error}") from error
    if len({label for _, label in splits["train"]}) < 2:
        raise DataError(f"{table}: two or more labels of training images are expected")
    return {split: files for split, files in splits.items() if files}, folds


def _check_columns(table: Path, columns: TableColumns, names: Sequence[str]) -> None:
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"{table}:1: has more than one column {join_names(repeated)}; rename or remove one")
    required = [columns.file, columns.label]
    optional = {columns.split: TableColumns.split, columns.fold: TableColumns.fold}
    required += [name for name, default in optional.items() if name and name != default]
    if missing := [name for name in required if name not in names]:
        problem = f"has no column {' and '.join(missing)}, only {join_names(names) or 'none'}"
        raise DataError(f"{table}:1: {problem}; set data.dataset.columns='{{file: NAME, label: NAME}}'")
    if unused := [repr(name) for name in names if name and name not in (*required, *optional)]:
        log.warning("%s: columns that are not used: %s", table, join_names(unused))


def _parse_row(
    row: dict[str | Any, Any], columns: TableColumns, suffix: str, folder: Path
) -> tuple[Path, str, str, str]:
    """Return the file, class, split and fold of a row; raises `ValueError` if the row cannot be used."""
    if None in row:
        raise ValueError("has more fields than the header; quote values with commas")
    name, label = ((row[column] or "").strip() for column in (columns.file, columns.label))
    if not (name and label):
        raise ValueError(f"has no value in the column {columns.label if name else columns.file}")
    spelling = (row.get(columns.split, "train") or "").strip()
    split = SPLIT_OF.get(spelling.lower())
    if not split:
        raise ValueError(f"{columns.split}={spelling}: must be train, val or test")
    fold = str(row.get(columns.fold) or "").strip().removesuffix(".0")  # pandas writes 0.0 if some rows have no fold.
    if fold and not fold.isdecimal():
        raise ValueError(f"{columns.fold}={fold}: must be a whole number; data.dataset.columns.fold=null ignores it")
    name += suffix
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    path = next((folder / form for form in forms if (folder / form).exists()), folder / name)
    if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
        raise ValueError(f"{name}: must be below data.dataset.path={folder}, without '..'")
    return path, to_nfc(label), split, fold
