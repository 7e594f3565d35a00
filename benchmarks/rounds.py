"""Shared by the benchmark scripts: their command line, rounds in which candidates take turns, reports as Markdown."""

import argparse
import shlex
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

from vitmnist.cli.messages import describe_failure
from vitmnist.runtime.timer import synchronize
from vitmnist.timing.benchmark import rotate

Name = TypeVar("Name")
Result = TypeVar("Result")


def command_line(description: str | None, rounds: int | None = 5) -> argparse.ArgumentParser:
    """A parser with `--output` and, unless `rounds` is None, `--rounds` with that default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        meaning = "measured rounds, after one that does not count"
        parser.add_argument("--rounds", type=at_least_one, default=rounds, help=meaning)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    return parser


def mnist_command_line(description: str | None) -> argparse.ArgumentParser:
    """The same, with the options of the scripts that load MNIST in batches."""
    parser = command_line(description)
    parser.add_argument("--batch-size", type=at_least_one, default=500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, help="the first N images; default: all")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for downloaded and decoded files")
    return parser


def at_least_one(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(parser: argparse.ArgumentParser, report: Callable[[argparse.Namespace], str]) -> None:
    """Parse the command line, measure, and print the report; a mistake of the user ends with a usage message.

    Args:
        report: measures what the arguments ask for; returns the text to print, and to write to `--output`.
    """
    arguments = parser.parse_args()
    output: Path | None = arguments.output
    if output and not output.parent.is_dir():  # checked before anything is measured
        parser.error(f"--output {output}: there is no folder {output.parent}")
    try:
        text = report(arguments)
    except Exception as error:
        failure = describe_failure(error)
        if not failure.is_user_error:
            raise
        parser.error(failure.message)
    print(text, end="")
    if output:
        output.write_text(text, encoding="utf-8")


def take_turns(candidates: Mapping[Name, Callable[[int], Result]], rounds: int) -> dict[Name, list[Result]]:
    """Call each candidate with the round's number; returns its results, without those of the first round, a warm-up.

    Each result is printed to stderr as it comes, so that a program that is stopped has shown some.
    """
    results: dict[Name, list[Result]] = {name: [] for name in candidates}
    for number, names in enumerate(tqdm(rotate(list(candidates), rounds + 1), "round", rounds + 1)):
        for name in names:
            result = candidates[name](number)
            if number:
                results[name].append(result)
                tqdm.write(f"round {number}, {name}: {result}", file=sys.stderr)
    return results


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def raise_clocks(work: Callable[[], object], device: torch.device) -> None:
    """Keep a GPU busy for half a second, because an idle one lowers its clocks; on a CPU do nothing."""
    started = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - started < 0.5:
        work()
        synchronize(device)


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def ratios(values: Iterable[float], references: Iterable[float]) -> str:
    """Median and range of the rounds' ratios."""
    return spread([value / reference for value, reference in zip(values, references, strict=True)], 3)


def report(title: str, environment: Mapping[str, Any], method: str, *parts: str) -> str:
    """A page in Markdown: title, how the figures were obtained, and paragraphs or tables.

    Args:
        environment: from `describe_environment`, or the `environment` of a `result.json`.
        method: in sentences; may be empty.
    """
    commit = str(environment["git_commit"])[:10] + (" and changes" if environment["git_dirty"] else "")
    machine = (
        f"{date.today()}, {environment['gpu'] or environment['cpu']}, {environment['cpu_count']} CPU cores, "
        f"torch {environment['torch']}, Python {environment['python']}, commit {commit}."
    )
    command = f"Written by `{shlex.join(['python', *sys.argv])}`."
    return "\n\n".join([f"# {title}", " ".join(filter(None, [machine, method, command])), *parts]) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return str(tabulate(list(rows), header, "github", disable_numparse=True))
