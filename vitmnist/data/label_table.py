"""Reads a table of labels: a CSV file with the file and the class of each image, and optionally its split and fold."""

import csv
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from vitmnist.data.image_listing import SPLIT_OF, SPLITS, ClassOfImage, ImageListing, Remark, to_nfc
from vitmnist.data.images import ReadImage
from vitmnist.errors import DataError, join_names


@dataclass
class TableColumns:
    """The names of the columns of a table of labels."""

    file: str = "file"
    label: str = "label"
    split: str = "split"
    fold: str | None = "fold"


def read_label_table(table: Path, columns: TableColumns, suffix: str, folder: Path, read: ReadImage) -> ImageListing:
    """List the images in `folder` with the classes, splits and folds in a table.

    Args:
        table: the CSV file, in UTF-8.
        columns: the names of its columns. Without a column with the default name `split`, all images are for training.
        suffix: appended to the names of the files.

    Raises:
        DataError: the table cannot be read, or a line cannot be used.
    """
    splits: dict[str, ClassOfImage] = {split: {} for split in SPLITS}
    folds: dict[str, int] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:  # Spreadsheets write a byte order mark.
            rows = csv.DictReader(file)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
            remarks = _check_columns(table, columns, rows.fieldnames)
            for row in rows:
                try:
                    name, label, split, fold = _parse_row(row, columns, suffix, folder)
                    if any(name in images for images in splits.values()):
                        raise ValueError(f"{name} is in an earlier line too")
                except ValueError as error:
                    raise DataError(f"{table}:{rows.line_num}: {error}") from error
                splits[split][name] = label
                if fold is not None:
                    folds[name] = fold
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data.dataset.labels={table}: cannot be read: {error}") from error
    splits = {split: images for split, images in splits.items() if images or split == "train"}
    return ImageListing(folder, splits, read, folds=folds, remarks=remarks)


def _check_columns(table: Path, columns: TableColumns, names: Sequence[str]) -> list[Remark]:
    """Raise `DataError` if a column is missing; remark on those that are not used."""
    required = [columns.file, columns.label]
    # A table may lack the split and the fold, unless the configuration gives their columns other names.
    optional = {columns.split: TableColumns.split, columns.fold: TableColumns.fold}
    required += [name for name, default in optional.items() if name and name != default]
    if missing := [name for name in required if name not in names]:
        problem = f"has no column {' and '.join(missing)}, only {join_names(names) or 'none'}"
        raise DataError(f"{table}:1: {problem}; set data.dataset.columns='{{file: NAME, label: NAME}}'")
    unused = [repr(name) for name in names if name and name not in (*required, *optional)]
    return [(WARNING, f"{table}: columns that are not used: {join_names(unused)}")] if unused else []


def _parse_row(
    row: dict[str | Any, Any], columns: TableColumns, suffix: str, folder: Path
) -> tuple[str, str, str, int | None]:
    """Return the relative path, class, split and fold, if any, of an image; raises `ValueError` for an unusable row."""
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
    path = Path(os.path.normpath(path))  # Not `resolve`: links to other folders are allowed.
    if not path.is_relative_to(folder):
        raise ValueError(f"{name}: must be below data.dataset.path={folder}")
    return path.relative_to(folder).as_posix(), to_nfc(label), split, int(fold) if fold else None
