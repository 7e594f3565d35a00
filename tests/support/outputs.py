"""Reads the outputs of runs and sweeps."""

import csv
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0}).Reload()


def jobs(sweep: Path) -> list[Path]:
    return sorted(sweep.glob("[0-9]*"), key=lambda folder: int(folder.name.partition("-")[0]))


def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "report.csv").open() as file:
        return list(csv.DictReader(file))
