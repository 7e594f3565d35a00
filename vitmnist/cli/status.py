"""Lists the runs in or below some folders, with their progress.

vitmnist status outputs
vitmnist status --json outputs
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from vitmnist.cli.command import create_parser, errors_as_messages
from vitmnist.errors import escape_unprintable
from vitmnist.runtime.files import display_path
from vitmnist.tracking.runs import Run, find_runs, read_run


def describe_progress(run: Run) -> dict[str, Any]:
    """Describe the progress of a run; `written_at` is when it ended or last wrote a file, in seconds since 1970."""
    table = run.folder / "epochs.csv"
    epochs_done = len(run.result.epochs)
    if not epochs_done and table.is_file():
        epochs_done = max(table.read_bytes().count(b"\n") - 1, 0)
    return {
        "folder": display_path(run.folder),
        "name": run.config.get("name"),
        "tags": run.config.get("tags") or [],
        "state": run.result.status,
        "epochs_done": epochs_done,
        "epochs": 1 if run.config.get("limit_batches") else run.config.get("epochs"),
        "written_at": run.result.ended_at,
    }


@errors_as_messages()
def main() -> None:
    parser = create_parser("status", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    runs = [describe_progress(read_run(folder)) for folder in find_runs(options.folders)]
    if options.json:
        print(json.dumps(runs))
        return
    for run in runs:
        run["tags"] = ", ".join(run["tags"]) or None
        run["written_at"] = f"{datetime.fromtimestamp(run['written_at']):%Y-%m-%d %H:%M:%S}"
    columns = [key for key in runs[0] if any(run[key] is not None for run in runs)]
    rows = [{key: run[key] for key in columns} for run in runs]
    print(escape_unprintable(tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True)))
