"""Commands about many runs: `report` compares them, `status` lists them with their progress."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tabulate import tabulate

from vitmnist.cli.command import command
from vitmnist.runtime.files import display_path
from vitmnist.tracking.result import Run, find_runs, read_run

MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Progress:
    """How far a run has got.

    Args:
        epochs: those planned; None if unknown.
        written_at: when the run ended or last wrote a file, in seconds since 1970.
    """

    folder: str
    state: str
    epochs_done: int
    epochs: int | None
    written_at: float

    @classmethod
    def of(cls, run: Run) -> Progress:
        """Read what a run has written until now."""
        last = max(path.stat().st_mtime for path in (run.folder, *run.folder.glob("*")) if path.exists())
        table, epochs = run.folder / "epochs.csv", run.config.get("epochs")
        done = len(run.epochs) or (max(table.read_bytes().count(b"\n") - 1, 0) if table.is_file() else 0)
        planned = epochs if isinstance(epochs, int) else None  # a record of unknown origin may have anything there
        return cls(display_path(run.folder), run.status, done, planned, run.result.ended_at or last)

    def row(self, now: float) -> dict[str, str]:
        """A row of the table, by title."""
        epochs = f"{self.epochs_done}/{'?' if self.epochs is None else self.epochs}"
        written = f"{duration(now - self.written_at)} ago"
        return {"run": self.folder, "state": self.state, "epochs": epochs, "written": written}


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
        print(json.dumps([asdict(Progress.of(run)) for run in runs]))
    else:
        rows = [Progress.of(run).row(time.time()) for run in runs]
        print(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True))
