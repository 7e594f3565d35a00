"""How exact `vitmnist.diagnose` is: sources and steps that sleep, so that the truth is known.

    python benchmarks/diagnose.py --output benchmarks/results/diagnose-cpu.md

T is compared with the same loop written by hand, over 100 batches after 20 that do not count. The predicted time of
`ram` is compared with a loop over `from_dataloader(dataloader, "ram")`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from itertools import islice
from typing import Any

import torch
from rounds import command_line, main, report, table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitmnist import diagnose, from_dataloader
from vitmnist.errors import UserError
from vitmnist.tracking.environment import describe_environment

CASES = ((2, 20), (20, 2), (10, 10))  # milliseconds that loading and computing sleep for, per batch
WARM_UP, BATCHES = 20, 100


class Sleeping(Dataset[Any]):
    """Samples whose batches take a given time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(index)), index

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        time.sleep(self.seconds)
        return [self[index] for index in indices]


class SleepingStep:
    """A training step that takes a given time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Any) -> None:
        time.sleep(self.seconds)


def by_hand(loader: Iterable[Any], step: SleepingStep) -> float:
    """Seconds per batch of a plain loop."""
    batches = iter(loader)
    for batch in islice(batches, WARM_UP):
        step(batch)
    started = time.perf_counter()
    for batch in islice(batches, BATCHES):
        step(batch)
    return (time.perf_counter() - started) / BATCHES


def measure(loading_ms: float, step_ms: float, workers: int, seconds: float) -> list[str]:
    """A row of the table."""
    dataloader = DataLoader(Sleeping(loading_ms / 1000), batch_size=10, shuffle=True, num_workers=workers)
    step = SleepingStep(step_ms / 1000)
    both_s = by_hand(dataloader, step)
    decoded_s = by_hand(from_dataloader(dataloader, "ram"), step)
    with redirect_stdout(None):
        found = diagnose(dataloader, step, seconds=seconds)
    predicted = next(row.batch_s for row in found.alternatives if row.name == "ram")
    assert predicted is not None
    return [
        f"{loading_ms:g}, {step_ms:g}, {workers}",
        *(f"{1000 * figure.median:.2f}" for figure in (found.loading_s, found.step_s, found.batch_s)),
        f"{1000 * both_s:.2f}",
        f"{found.batch_s.median / both_s:.3f}",
        f"{1000 * predicted.median:.2f}",
        f"{1000 * decoded_s:.2f}",
        f"{predicted.median / decoded_s:.3f}",
    ]


def compare(arguments: argparse.Namespace) -> str:
    """Measure every case; the report."""
    if arguments.seconds <= 0:
        raise UserError("--seconds must be above 0")
    header = ["sleeps (loading, step, workers)", "T1", "T2", "T", "T by hand", "ratio"]
    header += ["ram, predicted", "ram, by hand", "ratio"]
    return report(
        "The figures of a diagnosis against the truth",
        describe_environment(torch.device("cpu")),
        "Milliseconds per batch.",
        table(header, [measure(*case, workers, arguments.seconds) for workers in arguments.workers for case in CASES]),
    )


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=None)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each diagnosis")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    main(parser, compare)
