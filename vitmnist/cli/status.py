"""List the runs in or below some folders, with their progress.

vitmnist status outputs
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from vitmnist.cli.command import command
from vitmnist.errors import printable
from vitmnist.runtime.files import display_path
from vitmnist.runtime.records import read_json
from vitmnist.tracking.heartbeat import FILE, INTERVAL_S
from vitmnist.tracking.runs import Run, find_runs, read_run

MINUTE, HOUR, DAY = 60, 3600, 86400


def row(run: Run, now: float) -> dict[str, str]:
    """Folder, state, progress, age of the last sign of life, and the process that gave it."""
    beat = _heartbeat(run.folder)
    state, updated_at = run.status, run.result.get("ended_at")
    epochs = f"{len(run.epochs)}/{str(run.config.get('epochs', '?'))[:20]}"
    progress, process = f"epoch {epochs}" if run.epochs else "", ""
    if beat and not run.result:
        updated_at, process = beat["updated_at"], f"{beat['host']}:{beat['pid']}"
        # A lock is not visible on all file systems and from other machines.
        state = beat["status"] if run.status == "running" or now - updated_at < 3 * INTERVAL_S else "killed"
        progress = f"epoch {beat['epoch']}/{beat['epochs']}, batch {beat['batch']}/{beat['batches']}"
    age = duration(now - float(updated_at)) if updated_at is not None and math.isfinite(updated_at) else ""
    cells = {"run": display_path(run.folder), "state": state, "progress": progress, "age": age, "process": process}
    return {title: printable(str(cell)) for title, cell in cells.items()}


def duration(seconds: float) -> str:
    """A duration in its largest unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in (("d", DAY), ("h", HOUR), ("min", MINUTE)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _heartbeat(folder: Path) -> Mapping[str, Any] | None:
    """The `progress.json` of a run; None if there is none, or it is damaged."""
    try:
        beat = read_json(folder / FILE)
        shown = {key: str(beat[key])[:40] for key in ("status", "epoch", "epochs", "batch", "batches", "host", "pid")}
        return {**shown, "updated_at": float(beat["updated_at"])}
    except (FileNotFoundError, ValueError, OverflowError, KeyError, TypeError):
        return None


def _parse(parser: ArgumentParser) -> Namespace:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    return parser.parse_args()


@command(_parse)
def main(options: Namespace) -> None:
    rows = [row(read_run(folder), time.time()) for folder in find_runs(options.folders)]
    print(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True))
