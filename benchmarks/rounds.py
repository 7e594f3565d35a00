"""Shared by the benchmark scripts: rounds in which the candidates take turns, and reports as Markdown."""

from __future__ import annotations

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

from vitmnist.runtime.timer import synchronize

T = TypeVar("T")


def rotated(candidates: list[T], number: int) -> list[T]:
    """The order of round `number`: each round starts with another candidate, so that none is always first."""
    start = number % len(candidates)
    return candidates[start:] + candidates[:start]


def raise_clocks(work: Callable[[], object], device: torch.device) -> None:
    """Let an idle GPU, which has lowered its clocks, work for half a second; on a CPU do nothing."""
    started = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - started < 0.5:
        work()
        synchronize(device)


def ratio(values: Sequence[float]) -> str:
    """Median and range of the ratios of all rounds."""
    return f"{median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def describe(environment: Mapping[str, Any], method: str = "") -> str:
    """The paragraph under a report's title: date, machine, versions, method and command line.

    Args:
        environment: From `describe_environment`, or the `environment` of a `result.json`.
        method: How the figures were obtained, in sentences.
    """
    commit = str(environment["git_commit"])[:10] + (" and changes" if environment["git_dirty"] else "")
    sentences = [
        f"{date.today()}, {environment['gpu'] or environment['cpu']}, {environment['cpu_count']} CPU cores, "
        f"torch {environment['torch']}, Python {environment['python']}, commit {commit}.",
        method,
        f"Written by `{shlex.join(['python', *sys.argv])}`.",
    ]
    return " ".join(filter(None, sentences))


def check_output(parser: argparse.ArgumentParser, output: Path | None) -> None:
    """Exit with a usage message if the folder of `--output` is missing, before anything is measured."""
    if output and not output.parent.is_dir():
        parser.error(f"--output {output}: there is no folder {output.parent}")


def publish(report: str, output: Path | None) -> None:
    """Print a report, and write it to `output` if given."""
    print(report, end="")
    if output:
        output.write_text(report)
