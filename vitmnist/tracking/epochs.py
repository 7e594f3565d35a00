"""`epochs.csv`: the epochs of `result.json` as a table, for spreadsheets and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitmnist.runtime.files import write_atomic
from vitmnist.runtime.records import csv_text
from vitmnist.tracking.metrics import METRICS, EpochRecord

COLUMNS = ("epoch", *(metric.name for metric in METRICS), "first_of_start", "ended_at")


def write_epochs(epochs: Sequence[EpochRecord], folder: Path) -> None:
    """Write `epochs.csv` into `folder` atomically: a row for each epoch, an empty cell for what was not measured.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(folder / "epochs.csv", csv_text(COLUMNS, epochs).encode())
