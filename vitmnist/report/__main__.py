"""Compare all runs in or below some folders, and write a report.

python -m vitmnist.report outputs/sweeps/DATE/TIME
python -m vitmnist.report outputs/sweeps/DATE/TIME outputs/sweeps/DATE/TIME --output comparison
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

from vitmnist.errors import UserError
from vitmnist.report.write import as_text, write_report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or sweeps")
    parser.add_argument(
        "--output", type=Path, help="folder of the report (default: DIR, or outputs/reports/TIME if there are several)"
    )
    arguments = parser.parse_args()
    folders: list[Path] = arguments.folders
    default = folders[0] if len(folders) == 1 else Path("outputs/reports") / f"{datetime.now():%Y-%m-%d/%H-%M-%S}"
    output: Path = arguments.output or default
    try:
        comparisons = write_report(folders, output)
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or output}: {error.strerror}; choose another folder with --output")
    print(f"{as_text(comparisons)}\n\nReport: {output / 'report.html'}")


if __name__ == "__main__":
    main()
