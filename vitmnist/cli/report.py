"""Commands about many runs: `report` compares them, `status` lists them with their progress."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tabulate import tabulate

from vitmnist.cli.command import command
from vitmnist.runtime.files import display_path
from vitmnist.tracking.result import Run, find_runs, read_run


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
        table = run.folder / "epochs.csv"
        done = len(run.epochs) or (max(table.read_bytes().count(b"\n") - 1, 0) if table.is_file() else 0)
        return cls(display_path(run.folder), run.status, done, run.config.get("epochs"), run.result.ended_at or last)

    def row(self) -> dict[str, str]:
        """A row of the table, by title."""
        written = f"{datetime.fromtimestamp(self.written_at):%Y-%m-%d %H:%M:%S}"
        epochs = f"{self.epochs_done}/{self.epochs or '?'}"
        return {"run": self.folder, "state": self.state, "epochs": epochs, "written": written}


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
        rows = [Progress.of(run).row() for run in runs]
        print(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True))
