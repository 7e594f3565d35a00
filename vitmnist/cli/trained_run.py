"""The arguments of `evaluate`, `predict` and `export` that name a run."""

from argparse import ArgumentParser
from pathlib import Path

from vitmnist.checkpoint.storage import WEIGHT_FILES


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `evaluate`, `predict` and `export` share."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--weights", choices=[*WEIGHT_FILES], help="default: the first of these that exists")


def add_dataset_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `evaluate` and `export` share."""
    add_run_arguments(parser)
    parser.add_argument(
        "overrides", nargs="*", help="changes to the run's configuration, such as data.dataset.path=other"
    )
