"""Commands about many runs: `report` compares them, `status` lists them with their progress."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from vitmnist.cli.command import command
from vitmnist.errors import printable
from vitmnist.runtime.files import display_path
from vitmnist.tracking.result import Run, find_runs, read_run

MINUTE, HOUR, DAY = 60, 3600, 86400


def progress(run: Run) -> dict[str, Any]:
    """Folder, state, epochs done and in all, and when the run ended or last wrote a file, in seconds since 1970."""
    last = max(path.stat().st_mtime for path in (run.folder, *run.folder.glob("*")) if path.exists())
    epochs = run.config.get("epochs")
    return {
        "folder": display_path(run.folder),
        "state": run.status,
        "epochs_done": len(run.epochs) or _rows(run.folder / "epochs.csv"),
        "epochs": epochs if isinstance(epochs, int) else None,  # a record of unknown origin may have anything there
        "written_at": run.result.ended_at or last,
    }


def row(run: Run, now: float) -> dict[str, str]:
    """The `progress` of a run as a row of the table."""
    values = progress(run)
    cells = {
        "run": values["folder"],
        "state": values["state"],
        "epochs": f"{values['epochs_done']}/{'?' if values['epochs'] is None else values['epochs']}",
        "written": f"{duration(now - values['written_at'])} ago",
    }
    return {title: printable(cell) for title, cell in cells.items()}


def _rows(table: Path) -> int:
    """The lines of a file below its header, as far as they are in its first 64 MiB."""
    if not table.is_file():
        return 0
    with table.open("rb") as file:
        return max(file.read(1 << 26).count(b"\n") - 1, 0)


def duration(seconds: float) -> str:
    """A duration in its largest unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in (("d", DAY), ("h", HOUR), ("min", MINUTE)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _parse_report(parser: ArgumentParser) -> Namespace:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    default = "default: DIR, or outputs/reports/TIME if there are several"
    parser.add_argument("--output", type=Path, help=f"folder of the report ({default})")
    return parser.parse_args()


@command("report", _parse_report)
def report(options: Namespace) -> None:
    """Compare all runs in or below some folders, and write a report.

    vitmnist report outputs/sweeps/DATE/TIME
    vitmnist report outputs/sweeps/DATE/TIME outputs/sweeps/DATE/TIME --output comparison
    """
    from vitmnist.report.write import as_text, write_report  # imports matplotlib, which takes a second

    is_single = len(options.folders) == 1
    default = options.folders[0] if is_single else Path(f"outputs/reports/{datetime.now():%Y-%m-%d/%H-%M-%S}")
    output: Path = options.output or default
    text = as_text(write_report(options.folders, output))
    print(f"{text}\n\nReport: {output / 'report.html'}")


def _parse_status(parser: ArgumentParser) -> Namespace:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


@command("status", _parse_status)
def status(options: Namespace) -> None:
    """List the runs in or below some folders, with their progress.

    vitmnist status outputs
    vitmnist status --json outputs
    """
    runs = [read_run(folder) for folder in find_runs(options.folders)]
    if options.json:
        print(json.dumps([progress(run) for run in runs]))
    else:
        rows = [row(run, time.time()) for run in runs]
        print(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True))
