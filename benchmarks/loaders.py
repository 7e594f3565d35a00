"""Times loading alone, without a model: the loaders of this project and the usual ways of loading tensors.

    python benchmarks/loaders.py --batch-size 500 --output benchmarks/results/loaders-bs500.md

All candidates run in one process. In each round, each delivers an epoch of MNIST, shuffled by sample. A ratio divides
the time of an epoch by the time of the plain loop `x[permutation[i:j]]` over a normalised float32 tensor in the same
round. The first epoch, which starts workers, compiles, and touches memory for the first time, has its own column.
Libraries that are not installed are left out; `pip install -e '.[bench]'` installs them.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from baselines import LIBRARIES, Epoch, Target, per_batch, per_sample, plain_loop
from rounds import create_mnist_parser, format_ratios, format_report, format_table, main, measure_seconds, take_turns
from torch import Tensor
from torch.utils.data import TensorDataset

from vitmnist import Preprocess, load_dataset, make_loader
from vitmnist.data.datasets.base import Split
from vitmnist.data.sources import TensorSet
from vitmnist.loaders.workers import SplitSamples
from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment

PLAIN = "plain loop x[permutation[i:j]]"
UINT8, FLOAT32, DISK, BLOCKS = "uint8", "normalised float32", "float32, from disk by sample", "uint8, whole blocks"


@dataclass
class Candidate:
    """A way of loading, and the times of its epochs (s)."""

    name: str
    delivers: str
    epoch: Epoch
    seconds: list[float] = field(default_factory=list)

    def run(self, images: int, device: torch.device, number: int) -> None:
        """Time an epoch until the device is idle."""
        delivered: list[int] = []
        self.seconds.append(
            measure_seconds(lambda: delivered.extend(len(labels) for _, labels in self.epoch(number)), device)
        )
        assert sum(delivered) == images, f"{self.name} delivered {sum(delivered)} images"


def build_candidates(split: Split, target: Target, root: str, stack: ExitStack) -> list[Candidate]:
    """Build all candidates, first the plain loop over normalised floats."""
    normalised = TensorSet(Preprocess(split)(split.images), split.labels)
    ours = partial(open_loader, split, target, stack)
    candidates = [
        Candidate(PLAIN, FLOAT32, plain_loop(target, normalised)),
        *build_uint8_candidates(split, target, root, ours),
    ]
    candidates.append(Candidate(PLAIN, UINT8, plain_loop(target, split)))
    for delivers, tensors in ((UINT8, split), (FLOAT32, normalised)):
        dataset = TensorDataset(tensors.images, tensors.labels)
        candidates.append(Candidate("DataLoader(sampler=BatchSampler)", delivers, per_batch(target, dataset)))
        candidates += [
            Candidate(f"DataLoader(TensorDataset), {workers} workers", delivers, per_sample(target, dataset, workers))
            for workers in (0, 2)
        ]
        candidates += [
            Candidate(name, delivers, build(target, tensors))
            for package, (name, build) in LIBRARIES.items()
            if find_spec(package)
        ]
    for workers in (0, 2):
        candidates.append(Candidate(f"disk, {workers} workers", DISK, ours("disk", num_workers=workers)))
        dataloader = per_sample(target, SplitSamples(split), workers)
        candidates.append(Candidate(f"the same in a DataLoader, {workers} workers", DISK, dataloader))
    return candidates


def open_loader(
    split: Split,
    target: Target,
    stack: ExitStack,
    name: str,
    then: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Epoch:
    """Open a loader of this project, followed by a function of its images."""
    common: dict[str, Any] = {"batch_size": target.batch_size, "device": target.device, "seed": 42}
    loader = stack.enter_context(make_loader(name, split, **common, **options))
    if then is None:
        return loader.epoch
    return lambda number: ((then(images), labels) for images, labels in loader.epoch(number))


def build_uint8_candidates(split: Split, target: Target, root: str, ours: Callable[..., Epoch]) -> list[Candidate]:
    """Build the loaders that deliver uint8, also followed by `Preprocess`, eager and compiled."""
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


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds and return the report."""
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    with ExitStack() as stack:
        plain, *others = build_candidates(split, Target(arguments.batch_size, device), arguments.root, stack)
        compared = [plain, *(candidate for candidate in others if arguments.only in candidate.name)]
        turns = {number: partial(candidate.run, len(split), device) for number, candidate in enumerate(compared)}
        take_turns(turns, arguments.rounds)
    return format_report(
        f"Loading {len(split):,} images at batch size {arguments.batch_size}, without a model",
        describe_environment(device),
        f"Median of {arguments.rounds} epochs after the first; a ratio is the median and range of the rounds' ratios.",
        *format_tables(compared, -(-len(split) // arguments.batch_size)),
    )


def format_tables(compared: list[Candidate], batches: int) -> list[str]:
    """Format a heading and a table for each kind of batch; different kinds are different work."""
    header = ["candidate", "ms an epoch", "× plain loop", "µs a batch", "first epoch, ms"]
    plain = compared[0]
    parts = []
    for delivers in (FLOAT32, UINT8, BLOCKS, DISK):
        rows = []
        for candidate in (candidate for candidate in compared if candidate.delivers == delivers):
            first_s, *seconds = candidate.seconds
            epoch_s = median(seconds)
            relative = format_ratios(seconds, plain.seconds[1:])
            batch_us = f"{1e6 * epoch_s / batches:.1f}"
            rows.append([candidate.name, f"{1000 * epoch_s:.2f}", relative, batch_us, f"{1000 * first_s:.1f}"])
        if rows:
            parts += [f"## Delivering {delivers}", format_table(header, rows)]
    return parts


if __name__ == "__main__":
    parser = create_mnist_parser(__doc__)
    parser.add_argument("--only", default="", help="only the plain loop and candidates whose name contains this")
    main(parser, compare)
