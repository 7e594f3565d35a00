"""What loading alone costs: every loader of this project next to the usual ways of loading tensors.

    python benchmarks/loaders.py --batch-size 500 --output benchmarks/results/loaders-bs500

In one process every candidate runs through one epoch of MNIST per round, shuffled by sample; the batches are taken and
dropped, no model is involved. A round's ratio divides a candidate's epoch by that of the plain loop
`x[permutation[i:j]]` over a normalised float32 tensor in the same round. The first epoch is listed separately: it
starts workers, compiles, and touches memory for the first time. Libraries that are not installed are left out:
`pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from baselines import LIBRARIES, Epoch, NormalisedImages, Target, per_batch, per_sample, plain_loop
from rounds import check_output, describe, publish, rotated, table
from torch import Tensor
from torch.utils.data import TensorDataset
from tqdm import tqdm

from vitmnist import Preprocess, load_dataset, make_loader
from vitmnist.data.datasets import Split
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.loaders.prefetch import PrefetchLoader, PrefetchOptions
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import UserError
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment

PLAIN = "plain loop x[permutation[i:j]]"
UINT8, FLOAT32, DISK, BLOCKS = "uint8", "normalised float32", "float32, from disk by sample", "uint8, whole blocks"
OVERLAPS = ((0.01, 0.02), (0.02, 0.01), (0.02, 0.02))
"""Seconds per batch of loading and of computing, for the table on prefetching."""


@dataclass
class Candidate:
    """One way of loading, and the seconds of its epochs so far."""

    name: str
    delivers: str
    epoch: Epoch
    seconds: list[float] = field(default_factory=list)

    def run(self, number: int, images: int, device: torch.device) -> None:
        """Time one epoch, until the device has finished."""
        synchronize(device)
        start = time.perf_counter()
        delivered = sum(len(labels) for _, labels in self.epoch(number))
        synchronize(device)
        self.seconds.append(time.perf_counter() - start)
        assert delivered == images, f"{self.name} delivered {delivered} images"


def candidates(split: Split, target: Target, root: str, stack: ExitStack) -> list[Candidate]:
    """All ways of loading; the plain loop over normalised floats comes first."""
    normalised = TensorSet(Preprocess(split)(split.images), split.labels)
    ours = partial(our_loader, split, target, stack)
    found = [Candidate(PLAIN, FLOAT32, plain_loop(target, normalised)), *uint8_loaders(split, target, root, ours)]
    found.append(Candidate(PLAIN, UINT8, plain_loop(target, split)))
    for delivers, tensors in ((UINT8, split), (FLOAT32, normalised)):
        dataset = TensorDataset(tensors.images, tensors.labels)
        found.append(Candidate("DataLoader(sampler=BatchSampler)", delivers, per_batch(target, dataset)))
        found += [
            Candidate(f"DataLoader(TensorDataset), {workers} workers", delivers, per_sample(target, dataset, workers))
            for workers in (0, 2)
        ]
        found += [
            Candidate(name, delivers, build(target, tensors))
            for package, (name, build) in LIBRARIES.items()
            if find_spec(package)
        ]
    for workers in (0, 2):
        found.append(Candidate(f"disk, {workers} workers", DISK, ours("disk", num_workers=workers)))
        theirs = per_sample(target, NormalisedImages(split), workers)
        found.append(Candidate(f"the same in a DataLoader, {workers} workers", DISK, theirs))
    return found


def our_loader(
    split: Split,
    target: Target,
    stack: ExitStack,
    name: str,
    then: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Epoch:
    """One of this project's loaders, followed by a function of its images."""
    common: dict[str, Any] = {"batch_size": target.batch_size, "device": target.device, "seed": 42}
    loader = stack.enter_context(make_loader(name, split, **common, **options))
    if then is None:
        return loader.epoch
    return lambda number: ((then(images), labels) for images, labels in loader.epoch(number))


def uint8_loaders(split: Split, target: Target, root: str, ours: Callable[..., Epoch]) -> list[Candidate]:
    """The loaders that deliver uint8, also followed by `Preprocess`, eager and compiled."""
    eager = Preprocess(split).to(target.device)
    compiled = torch.compile(Preprocess(split).to(target.device))
    return [
        Candidate("ram", UINT8, ours("ram")),
        Candidate("gpu_slice", UINT8, ours("gpu_slice")),
        Candidate("cache", UINT8, ours("cache", folder=f"{root}/vitmnist-cache")),
        Candidate("prefetch of ram", UINT8, ours("prefetch", base="ram")),
        Candidate("ram", BLOCKS, ours("ram", shuffle="batch")),
        Candidate("gpu_slice", BLOCKS, ours("gpu_slice", shuffle="batch")),
        Candidate("ram, preprocess", FLOAT32, ours("ram", eager)),
        Candidate("ram, compiled preprocess", FLOAT32, ours("ram", compiled)),
        Candidate("gpu_slice, preprocess", FLOAT32, ours("gpu_slice", eager)),
        Candidate("gpu_slice, compiled preprocess", FLOAT32, ours("gpu_slice", compiled)),
    ]


class SleepingLoader(Loader):
    """Takes `seconds` for each batch without using the processor."""

    def __init__(self, sampler: EpochSampler, seconds: float) -> None:
        super().__init__(sampler)
        self.seconds = seconds

    def batches(self, number: int, start: int) -> Batches:
        for _ in range(start, len(self)):
            time.sleep(self.seconds)
            yield torch.zeros(1), torch.zeros(1)


def overlap(load: float, compute: float, batches: int = 100) -> float:
    """Seconds per batch with `prefetch` between a source and a consumer that sleep."""
    sampler = EpochSampler(batches, 1, 0)
    options = PrefetchOptions(base=LOADERS.complete({"name": "ram"}))
    tensors = TensorSet(torch.zeros(batches, 1), torch.zeros(batches))
    loader = PrefetchLoader(options, tensors, sampler, torch.device("cpu"))
    with loader:
        loader.base = SleepingLoader(sampler, load)
        start = time.perf_counter()
        for _ in loader.epoch(0):
            time.sleep(compute)
        return (time.perf_counter() - start) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=5, help="measured epochs, after a first one listed separately")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; default: all")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for the files of disk and cache")
    parser.add_argument("--only", default="", help="only the plain loop and candidates whose name contains this")
    parser.add_argument("--output", type=Path, help="also write PATH.md and PATH.csv")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    check_output(parser, arguments.output)
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the tables.

    Raises:
        UserError: the device or a size is not possible.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    with ExitStack() as stack:
        plain, *others = candidates(split, Target(arguments.batch_size, device), arguments.root, stack)
        compared = [plain, *(candidate for candidate in others if arguments.only in candidate.name)]
        for number in tqdm(range(arguments.epochs + 1), desc="round", file=sys.stderr):
            for candidate in rotated(compared, number):
                candidate.run(number, len(split), device)
    rows = [figures(candidate, plain, -(-len(split) // arguments.batch_size)) for candidate in compared]
    method = f"Median of {arguments.epochs} epochs; the ratio is the median of the rounds' ratios."
    title = f"# Loading {len(split):,} images at batch {arguments.batch_size}, without a model"
    report = "\n".join([title, "", describe(describe_environment(device), method), *tables(rows), *overlap_table(), ""])
    publish(report, arguments.output and arguments.output.with_suffix(".md"))
    if arguments.output:
        with arguments.output.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def figures(candidate: Candidate, plain: Candidate, batches: int) -> dict[str, Any]:
    """One row of the CSV file; the ratio is the median of the rounds' ratios."""
    ratios = [own / other for own, other in zip(candidate.seconds[1:], plain.seconds[1:], strict=True)]
    epoch_s = median(candidate.seconds[1:])
    return {
        "delivers": candidate.delivers,
        "candidate": candidate.name,
        "epoch_ms": round(1000 * epoch_s, 3),
        "ratio_to_plain_loop": round(median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "us_per_batch": round(1e6 * epoch_s / batches, 1),
        "first_epoch_ms": round(1000 * candidate.seconds[0], 3),
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """One table for each kind of batch: rows of different kinds are not the same work."""
    header = ["candidate", "ms an epoch", "× plain loop", "range of the ratio", "µs a batch", "first epoch, ms"]
    lines = []
    for delivers in (FLOAT32, UINT8, BLOCKS, DISK):
        cells = [
            [
                row["candidate"],
                f"{row['epoch_ms']:.2f}",
                f"{row['ratio_to_plain_loop']:.3f}",
                f"{row['ratio_min']:.3f}–{row['ratio_max']:.3f}",
                f"{row['us_per_batch']:.1f}",
                f"{row['first_epoch_ms']:.1f}",
            ]
            for row in rows
            if row["delivers"] == delivers
        ]
        if cells:
            lines += ["", f"## Delivering {delivers}", "", *table(header, cells)]
    return lines


def overlap_table() -> list[str]:
    """The table on prefetching: T1 + T2 should become max(T1, T2)."""
    rows = []
    for load, compute in OVERLAPS:
        both = overlap(load, compute)
        cells = (1000 * load, 0), (1000 * compute, 0), (1000 * both, 2), (both / max(load, compute), 3)
        rows.append([f"{value:.{digits}f}" for value, digits in cells])
    header = ["loading, ms", "computing, ms", "ms a batch", "× the larger of the two"]
    return ["", "## Prefetch with a source and a consumer that sleep", "", *table(header, rows)]


if __name__ == "__main__":
    main()
