"""What loading alone costs: every loader beside the ways that people load tensors with today.

    python benchmarks/loaders.py --batch-size 500 --output benchmarks/results/loaders-bs500

In one process every candidate runs through one epoch of MNIST, shuffled by sample, in turn, once a round; the batches
are taken and let go, no model is at work. A round's ratio is a candidate's epoch over that of the plain loop
`x[permutation[i:j]]` over a normalised float32 tensor in the same round. The first epoch stands apart: it starts
workers, compiles, and touches memory for the first time. Libraries that are not installed are left out:
`pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import data
from torchvision import transforms
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

Epoch = Callable[[int], Iterable[Any]]
"""The batches of epoch number n."""


@dataclass
class Candidate:
    """One way of loading, and the seconds that its epochs took."""

    name: str
    delivers: str
    epoch: Epoch
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What is the same for all candidates."""

    split: Split
    normalised: TensorSet
    batch_size: int
    device: torch.device
    root: str
    stack: ExitStack

    def indices(self, number: int) -> Iterator[Tensor]:
        """Index batches as a hand-written loop has them."""
        generator = torch.Generator().manual_seed(number)
        yield from torch.randperm(len(self.split), generator=generator).split(self.batch_size)

    def ours(
        self, name: str, shuffle: str = "sample", then: Callable[[Tensor], Tensor] | None = None, **options: Any
    ) -> Epoch:
        """One of this project's loaders, and what is done with its images."""
        parts: dict[str, Any] = {"batch_size": self.batch_size, "device": self.device, "seed": 42, "shuffle": shuffle}
        loader = self.stack.enter_context(make_loader(name, self.split, **parts, **options))
        if then is None:
            return loader.epoch
        return lambda number: ((then(images), labels) for images, labels in loader.epoch(number))

    def to_device(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of another library on the device."""
        for images, labels in batches:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def plain_loop(bench: Bench, arrays: TensorSet) -> Epoch:
    """What one writes by hand for tensors on the device."""
    images, labels = arrays.images.to(bench.device), arrays.labels.to(bench.device)

    def epoch(number: int) -> Iterator[Any]:
        permutation = torch.randperm(len(images), device=bench.device)
        for start in range(0, len(images), bench.batch_size):
            indices = permutation[start : start + bench.batch_size]
            yield images[indices], labels[indices]

    return epoch


def by_sample(bench: Bench, arrays: TensorSet, workers: int) -> Epoch:
    """What most people write: sample by sample, collated."""
    loader: data.DataLoader[Any] = data.DataLoader(
        data.TensorDataset(arrays.images, arrays.labels),
        bench.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=bench.device.type == "cuda",
    )
    return lambda number: bench.to_device(loader)


def by_batch(bench: Bench, arrays: TensorSet) -> Epoch:
    """What the documentation of `DataLoader` advises for data that can be read by the batch."""
    dataset = data.TensorDataset(arrays.images, arrays.labels)
    sampler = data.BatchSampler(data.RandomSampler(dataset), bench.batch_size, drop_last=False)
    loader: data.DataLoader[Any] = data.DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        pin_memory=bench.device.type == "cuda",
    )
    return lambda number: bench.to_device(loader)


def torchdata_nodes(bench: Bench, arrays: TensorSet) -> Epoch:
    """torchdata's nodes: batches of indices, gathered in two threads."""
    from torchdata import nodes

    dataset = data.TensorDataset(arrays.images, arrays.labels)
    sampler = data.BatchSampler(data.RandomSampler(dataset), bench.batch_size, drop_last=False)
    gather = nodes.ParallelMapper(nodes.SamplerWrapper(sampler), dataset.__getitem__, num_workers=2, method="thread")
    loader = nodes.Loader(gather)
    return lambda number: bench.to_device(loader)


def spdl_pipeline(bench: Bench, arrays: TensorSet) -> Epoch:
    """SPDL's pipeline: batches of indices, gathered in two threads."""
    from spdl.pipeline import PipelineBuilder

    def gather(indices: Tensor) -> tuple[Tensor, Tensor]:
        return arrays.images[indices], arrays.labels[indices]

    def epoch(number: int) -> Iterator[Any]:
        source = list(bench.indices(number))
        builder: Any = PipelineBuilder()
        builder = builder.add_source(source).pipe(gather, concurrency=2).add_sink(3)
        pipeline = builder.build(num_threads=2)
        with pipeline.auto_stop():
            yield from bench.to_device(pipeline)

    return epoch


def tensordict(bench: Bench, arrays: TensorSet) -> Epoch:
    """A TensorDict that is indexed by the batch."""
    from tensordict import TensorDict

    whole = TensorDict({"images": arrays.images, "labels": arrays.labels}, batch_size=[len(arrays)]).to(bench.device)

    def epoch(number: int) -> Iterator[Any]:
        for indices in bench.indices(number):
            batch = whole[indices.to(bench.device)]
            yield batch["images"], batch["labels"]

    return epoch


class NormalisedPictures(data.Dataset[tuple[Tensor, int]]):
    """The disk pipeline as one writes it by hand: picture, tensor, normalised tensor."""

    def __init__(self, split: Split) -> None:
        assert split.open_reader is not None
        self.reader, self.labels = split.open_reader(), split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.reader[index]), self.labels[index]


def plain_disk(bench: Bench, workers: int) -> Epoch:
    """That pipeline in a plain `DataLoader`."""
    loader: data.DataLoader[Any] = data.DataLoader(
        NormalisedPictures(bench.split),
        bench.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=bench.device.type == "cuda",
    )
    return lambda number: bench.to_device(loader)


LIBRARIES = {
    "torchdata": ("torchdata nodes, 2 threads", torchdata_nodes),
    "spdl": ("spdl pipeline, 2 threads", spdl_pipeline),
    "tensordict": ("tensordict", tensordict),
}


def candidates(bench: Bench) -> list[Candidate]:
    """All ways of loading, by what they deliver; the plain loop first."""
    eager = Preprocess(bench.split).to(bench.device)
    compiled = torch.compile(Preprocess(bench.split).to(bench.device))
    cache = f"{bench.root}/vitmnist-cache"
    found = [
        Candidate(PLAIN, FLOAT32, plain_loop(bench, bench.normalised)),
        Candidate("ram", UINT8, bench.ours("ram")),
        Candidate("gpu_slice", UINT8, bench.ours("gpu_slice")),
        Candidate("cache", UINT8, bench.ours("cache", folder=cache)),
        Candidate("prefetch of ram", UINT8, bench.ours("prefetch", base="ram")),
        Candidate("ram", BLOCKS, bench.ours("ram", shuffle="batch")),
        Candidate("gpu_slice", BLOCKS, bench.ours("gpu_slice", shuffle="batch")),
        Candidate("ram, preprocess", FLOAT32, bench.ours("ram", then=eager)),
        Candidate("ram, compiled preprocess", FLOAT32, bench.ours("ram", then=compiled)),
        Candidate("gpu_slice, preprocess", FLOAT32, bench.ours("gpu_slice", then=eager)),
        Candidate("gpu_slice, compiled preprocess", FLOAT32, bench.ours("gpu_slice", then=compiled)),
        Candidate(PLAIN, UINT8, plain_loop(bench, bench.split)),
    ]
    for delivers, arrays in ((UINT8, bench.split), (FLOAT32, bench.normalised)):
        found += [
            Candidate("DataLoader(sampler=BatchSampler)", delivers, by_batch(bench, arrays)),
            Candidate("DataLoader(TensorDataset), 0 workers", delivers, by_sample(bench, arrays, 0)),
            Candidate("DataLoader(TensorDataset), 2 workers", delivers, by_sample(bench, arrays, 2)),
        ]
        found += [
            Candidate(name, delivers, build(bench, arrays))
            for package, (name, build) in LIBRARIES.items()
            if find_spec(package)
        ]
    for workers in (0, 2):
        found.append(Candidate(f"disk, {workers} workers", DISK, bench.ours("disk", num_workers=workers)))
        found.append(Candidate(f"the same in a DataLoader, {workers} workers", DISK, plain_disk(bench, workers)))
    return found


def seconds_of(candidate: Candidate, number: int, images: int, device: torch.device) -> float:
    """The time of one epoch, up to the moment when the device is done."""
    synchronize(device)
    started = time.perf_counter()
    seen = sum(len(labels) for _, labels in candidate.epoch(number))
    synchronize(device)
    assert seen == images, f"{candidate.name} delivered {seen} images"
    return time.perf_counter() - started


class Sleeping(Loader):
    """A source that takes `seconds` for a batch without using the processor."""

    def __init__(self, sampler: EpochSampler, seconds: float) -> None:
        super().__init__(sampler)
        self.seconds = seconds

    def batches(self, number: int, start: int) -> Batches:
        for _ in range(start, len(self)):
            time.sleep(self.seconds)
            yield torch.zeros(1), torch.zeros(1)


def overlap(load: float, compute: float, batches: int = 100) -> float:
    """Seconds per batch where loading takes `load`, computing `compute`, and prefetch stands between them."""
    sampler = EpochSampler(batches, 1, 0)
    device = torch.device("cpu")
    options = PrefetchOptions(base=LOADERS.complete({"name": "ram"}))
    loader = PrefetchLoader(options, TensorSet(torch.zeros(batches, 1), torch.zeros(batches)), sampler, device)
    with loader:
        loader.base = Sleeping(sampler, load)
        started = time.perf_counter()
        for _ in loader.epoch(0):
            time.sleep(compute)
        return (time.perf_counter() - started) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=5, help="counted epochs, after a first that stands apart")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; all if not given")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="where disk and cache keep their files")
    parser.add_argument("--only", default="", help="only candidates whose name has this in it, beside the plain loop")
    parser.add_argument("--output", type=Path, help="write PATH.md and PATH.csv too")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the tables.

    Raises:
        UserError: a device or a size that cannot be.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    normalised = TensorSet(Preprocess(split)(split.images), split.labels)
    with ExitStack() as stack:
        bench = Bench(split, normalised, arguments.batch_size, device, arguments.root, stack)
        every = candidates(bench)
        compared = every[:1] + [candidate for candidate in every[1:] if arguments.only in candidate.name]
        for number in tqdm(range(arguments.epochs + 1), desc="round", file=sys.stderr):
            turn = number % len(compared)  # another one goes first each round
            for candidate in compared[turn:] + compared[:turn]:
                candidate.seconds.append(seconds_of(candidate, number, len(split), device))
        rows = [row(candidate, compared[0], -(-len(split) // arguments.batch_size)) for candidate in compared]
    overlaps = [(load, compute, overlap(load, compute)) for load, compute in ((0.01, 0.02), (0.02, 0.01), (0.02, 0.02))]
    report = markdown(rows, overlaps, len(split), arguments)
    print(report, end="")
    if arguments.output:
        arguments.output.with_suffix(".md").write_text(report)
        with arguments.output.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def row(candidate: Candidate, plain: Candidate, batches: int) -> dict[str, Any]:
    """A candidate's figures; the ratio is the median of the rounds' ratios."""
    ratios = [own / other for own, other in zip(candidate.seconds[1:], plain.seconds[1:], strict=True)]
    typical = median(candidate.seconds[1:])
    return {
        "delivers": candidate.delivers,
        "candidate": candidate.name,
        "epoch_ms": round(1000 * typical, 3),
        "ratio_to_plain_loop": round(median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "us_per_batch": round(1e6 * typical / batches, 1),
        "first_epoch_ms": round(1000 * candidate.seconds[0], 3),
    }


def markdown(
    rows: list[dict[str, Any]], overlaps: list[tuple[float, float, float]], images: int, arguments: argparse.Namespace
) -> str:
    """The tables, under the machine and the versions that they hold for."""
    machine = describe_environment(choose_device(arguments.device))
    lines = [
        f"# Loading {images:,} images at batch {arguments.batch_size}, without a model",
        "",
        f"{date.today()}, {machine['gpu'] or machine['cpu']}, {machine['cpu_count']} CPU cores, "
        f"torch {machine['torch']}, Python {machine['python']}, commit {str(machine['git_commit'])[:10]}"
        f"{' and changes' if machine['git_dirty'] else ''}. Median of {arguments.epochs} epochs; the ratio is the "
        f"median of the rounds' ratios. Written by `{shlex.join(['python', *sys.argv])}`.",
    ]
    for delivers in (FLOAT32, UINT8, BLOCKS, DISK):
        section = [figures for figures in rows if figures["delivers"] == delivers]
        if section:
            lines += [
                "",
                f"## Delivering {delivers}",
                "",
                "| candidate | ms an epoch | × plain loop | range of the ratio | µs a batch | first epoch, ms |",
                "|---|---|---|---|---|---|",
                *(
                    f"| {figures['candidate']} | {figures['epoch_ms']:.2f} | {figures['ratio_to_plain_loop']:.3f} | "
                    f"{figures['ratio_min']:.3f}–{figures['ratio_max']:.3f} | {figures['us_per_batch']:.1f} | "
                    f"{figures['first_epoch_ms']:.1f} |"
                    for figures in section
                ),
            ]
    lines += [
        "",
        "## Prefetch around a source that sleeps, for a consumer that sleeps",
        "",
        "| loading, ms | computing, ms | ms a batch | × the larger of the two |",
        "|---|---|---|---|",
        *(
            f"| {1000 * load:.0f} | {1000 * compute:.0f} | {1000 * both:.2f} | {both / max(load, compute):.3f} |"
            for load, compute, both in overlaps
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
