"""The code that the benchmarks share: command line, rounds in which candidates take turns, and reports in Markdown."""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from tabulate import tabulate
from tqdm import tqdm

from vitmnist.cli.messages import classify_cli_error
from vitmnist.runtime.timer import synchronize
from vitmnist.timing.benchmark import rotate

Name = TypeVar("Name")
Result = TypeVar("Result")


def create_parser(description: str | None, rounds: int | None = 5) -> argparse.ArgumentParser:
    """Create a parser with `--output` and, unless `rounds` is None, `--rounds` with that default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        help_text = "measured rounds, after a warm-up round"
        parser.add_argument("--rounds", type=positive_int, default=rounds, help=help_text)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    return parser


def create_mnist_parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser with the options of the scripts that load MNIST in batches."""
    parser = create_parser(description)
    parser.add_argument("--batch-size", type=positive_int, default=500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, help="the first N images; default: all")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for downloaded and decoded files")
    return parser


def positive_int(text: str) -> int:
    """Parse a command-line argument as an integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(parser: argparse.ArgumentParser, report: Callable[[argparse.Namespace], str]) -> None:
    """Parse the command line, measure, and print the report. A user error ends with a usage message.

    Args:
        report: measures with the parsed arguments; returns the text to print and to write to `--output`.
    """
    arguments = parser.parse_args()
    output: Path | None = arguments.output
    if output and not output.parent.is_dir():  # Check before anything is measured.
        parser.error(f"--output {output}: the folder {output.parent} does not exist; create it first")
    try:
        text = report(arguments)
    except Exception as error:
        failure = classify_cli_error(error)
        if not failure.is_user_error:
            raise
        parser.error(failure.message)
    print(text, end="")
    if output:
        output.write_text(text, encoding="utf-8")


def take_turns(candidates: Mapping[Name, Callable[[int], Result]], rounds: int) -> dict[Name, list[Result]]:
    """Call each candidate with the number of each round; return the results without round 0, the warm-up.

    Each result is printed to stderr at once, so that an interrupted program has shown some of them.
    """
    results: dict[Name, list[Result]] = {name: [] for name in candidates}
    for number, names in enumerate(tqdm(rotate(list(candidates), rounds + 1), "round", rounds + 1)):
        for name in names:
            result = candidates[name](number)
            if number:
                results[name].append(result)
                tqdm.write(f"round {number}, {name}: {result}", file=sys.stderr)
    return results


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a call, from an idle device to an idle device (s)."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def raise_clocks(work: Callable[[], object], device: torch.device) -> None:
    """Keep a GPU busy for half a second, because an idle GPU lowers its clocks. On a CPU, do nothing."""
    started = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - started < 0.5:
        work()
        synchronize(device)


def format_spread(values: Sequence[float], digits: int) -> str:
    """Format the median and the range."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def format_ratios(values: Iterable[float], references: Iterable[float]) -> str:
    """Format the median and the range of the rounds' ratios."""
    return format_spread([value / reference for value, reference in zip(values, references, strict=True)], 3)


def format_report(title: str, environment: Mapping[str, Any], method: str, *parts: str) -> str:
    """Format a page in Markdown: title, method, and paragraphs or tables.

    Args:
        environment: from `describe_environment`, or the `environment` of a `result.json`.
        method: sentences about the method, or an empty text.
    """
    folder = shlex.quote(str(Path(__file__).parent))
    failed, commit = subprocess.getstatusoutput(f"git -C {folder} describe --always --dirty --abbrev=10 --exclude='*'")
    machine = (
        f"{date.today()}, {environment['gpu'] or environment['cpu']}, {environment['cpu_count']} CPU cores, "
        f"torch {environment['torch']}, Python {environment['python']}, commit {'unknown' if failed else commit}."
    )
    command = f"Written by `{shlex.join(['python', *sys.argv])}`."
    return "\n\n".join([f"# {title}", " ".join(filter(None, [machine, method, command])), *parts]) + "\n"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    return str(tabulate(list(rows), header, "github", disable_numparse=True))
