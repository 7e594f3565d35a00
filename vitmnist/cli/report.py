"""Commands about many runs: `report` compares them, `status` lists them with their progress."""

import json
from argparse import ArgumentParser, Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from vitmnist.cli.command import command, echo
from vitmnist.runtime.files import display_path
from vitmnist.tracking.runs import Run, find_runs, read_run


def describe_progress(run: Run) -> dict[str, Any]:
    """How far a run has got; `written_at` is when it ended or last wrote a file, in seconds since 1970."""
    table = run.folder / "epochs.csv"
    epochs_done = len(run.result.epochs)
    if not epochs_done and table.is_file():
        epochs_done = max(table.read_bytes().count(b"\n") - 1, 0)
    return {
        "folder": display_path(run.folder),
        "state": run.status,
        "epochs_done": epochs_done,
        "epochs": run.config.get("epochs"),
        "written_at": run.result.ended_at,
    }


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
    from vitmnist.report.write import as_text, write_report  # This imports matplotlib, which takes a second.

    is_single = len(options.folders) == 1
    default = options.folders[0] if is_single else Path(f"outputs/reports/{datetime.now():%Y-%m-%d/%H-%M-%S}")
    output: Path = options.output or default
    text = as_text(write_report(options.folders, output))
    echo(f"{text}\n\nReport: {output / 'report.html'}")


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
    runs = [describe_progress(read_run(folder)) for folder in find_runs(options.folders)]
    if options.json:
        print(json.dumps(runs))
        return
    for run in runs:
        run["written_at"] = f"{datetime.fromtimestamp(run['written_at']):%Y-%m-%d %H:%M:%S}"
    echo(tabulate(runs, headers="keys", tablefmt="plain", disable_numparse=True))
