"""List the runs in or below some folders, with their progress.

vitmnist status outputs
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tabulate import tabulate

from vitmnist.cli.command import command
from vitmnist.errors import printable
from vitmnist.runtime.files import display_path
from vitmnist.tracking.runs import Run, find_runs, read_run

MINUTE, HOUR, DAY = 60, 3600, 86400


def row(run: Run, now: float) -> dict[str, str]:
    """Folder, state, completed epochs, and the time since the run ended or last wrote a file."""
    done = len(run.epochs) or _rows(run.folder / "epochs.csv")
    last = max(path.stat().st_mtime for path in (run.folder, *run.folder.glob("*")) if path.exists())
    epochs = str(run.config.get("epochs", "?"))[:20]
    cells = {"run": display_path(run.folder), "state": run.status, "epochs": f"{done}/{epochs}"}
    return {
        title: printable(cell)
        for title, cell in (cells | {"written": f"{duration(now - run.result.get('ended_at', last))} ago"}).items()
    }


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


def _parse(parser: ArgumentParser) -> Namespace:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    return parser.parse_args()


@command(_parse)
def main(options: Namespace) -> None:
    rows = [row(read_run(folder), time.time()) for folder in find_runs(options.folders)]
    print(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True))
