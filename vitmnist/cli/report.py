"""Compares all runs in or below some folders, and writes a report.

vitmnist report outputs/sweeps/DATE/TIME
vitmnist report outputs/sweeps/DATE/TIME outputs/sweeps/DATE/TIME --output comparison
"""

from datetime import datetime
from pathlib import Path

from vitmnist.cli.command import create_parser, errors_as_messages


@errors_as_messages()
def main() -> None:
    parser = create_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    help_text = "folder of the report (default: DIR; for several, outputs/reports/DATE/TIME)"
    parser.add_argument("--output", type=Path, help=help_text)
    options = parser.parse_args()
    from vitmnist.report.write import write_report  # Import late: matplotlib takes a second.

    new_folder = Path(f"outputs/reports/{datetime.now():%Y-%m-%d/%H-%M-%S}")
    output: Path = options.output or (options.folders[0] if len(options.folders) == 1 else new_folder)
    print(f"{write_report(options.folders, output)}\n\nReport: {output / 'report.html'}")
