"""`epochs.csv`: the epochs of `result.json` as a table, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from vitmnist.runtime.files import write_atomic
from vitmnist.tracking.metrics import METRICS, EpochRecord

COLUMNS = ("epoch", *(metric.name for metric in METRICS), "first_of_start", "ended_at")


def write_epochs(epochs: Sequence[EpochRecord], folder: Path) -> None:
    """Write `epochs.csv` into `folder` atomically: a row for each epoch, an empty cell for what was not measured.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")  # `steps` is a list
    writer.writeheader()
    writer.writerows(epochs)
    write_atomic(folder / "epochs.csv", text.getvalue().encode())
