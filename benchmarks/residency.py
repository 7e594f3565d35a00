"""What it costs to keep only a part of the set on the device: `gpu_slice` with `resident` from 0 to 1, without a model.

    python benchmarks/residency.py --batch-size 500 --output benchmarks/results/residency-cpu.md

In one process each fraction runs through one epoch of MNIST per round, shuffled by sample; the batches are taken and
dropped. The bytes are counted where tensors are copied to the device, and are the same on every machine. On the CPU a
copy in host memory stands for each of them, so the bytes are real, but the times are not those of a bus: only a GPU
shows those, and the uploads that overlap with its work.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rounds import check_output, describe, publish, ratio, rotated, table
from torch import Tensor
from tqdm import tqdm

from vitmnist import load_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import UserError
from vitmnist.runtime.device import ACCELERATORS, Accelerator, Cuda, choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
COPIES_ON_HOST = torch.device("privateuseone")
METHOD = (
    "Median of {epochs} epochs after a first one; the ratio is the median and the range of the rounds' ratios. Copied: "
    "images and labels that are not resident, 8 bytes for each image's index, and 8 for the place in its batch of each "
    "that is not resident. With everything resident, only the indices are copied, which is not counted."
)
ON_CPU = (
    "On this machine a copy in host memory stands for the bus: the bytes are real, the times are not those of a GPU."
)


class Bus:
    """The bytes that were copied to the device so far."""

    nbytes = 0


class CountingCuda(Cuda):
    """A CUDA device whose copies are counted."""

    def to_device(self, tensor: Tensor) -> Tensor:
        Bus.nbytes += tensor.nbytes
        return super().to_device(tensor)


class CountingHost(Accelerator):
    """Copies within host memory, as if the device had its own."""

    is_async = True

    def use_stream(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def to_device(self, tensor: Tensor) -> Tensor:
        Bus.nbytes += tensor.nbytes
        return tensor.clone()


def run(loader: Loader, number: int, device: torch.device) -> tuple[float, int]:
    """Seconds of an epoch, until the device has finished, and the bytes that it copied."""
    synchronize(device)
    start, before = time.perf_counter(), Bus.nbytes
    delivered = sum(len(labels) for _, labels in loader.epoch(number))
    synchronize(device)
    seconds = time.perf_counter() - start
    assert delivered == loader.sampler.size, f"delivered {delivered} images"
    return seconds, Bus.nbytes - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=5, help="measured epochs, after a first one that does not count")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; default: all")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder of the data sets")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    check_output(parser, arguments.output)
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the table.

    Raises:
        UserError: the device or a size is not possible.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    sampler = EpochSampler(len(split), arguments.batch_size, 42)
    ACCELERATORS.update({"cuda": CountingCuda, COPIES_ON_HOST.type: CountingHost})
    place = device if device.type == "cuda" else COPIES_ON_HOST
    with ExitStack() as stack:
        loaders = {}
        for fraction in FRACTIONS:
            values = {"name": "gpu_slice", "resident": fraction}
            loaders[fraction] = stack.enter_context(LOADERS.build(values, split, sampler, place))
        rounds = [
            {fraction: run(loaders[fraction], number, device) for fraction in rotated(list(FRACTIONS), number)}
            for number in tqdm(range(arguments.epochs + 1), desc="round", file=sys.stderr)
        ][1:]
    method = METHOD.format(epochs=arguments.epochs) + ("" if device.type == "cuda" else f" {ON_CPU}")
    title = f"# gpu_slice with a part of {len(split):,} images resident, batch {arguments.batch_size}, without a model"
    report = [title, "", describe(describe_environment(device), method), "", *rows(rounds), ""]
    publish("\n".join(report), arguments.output)


def rows(rounds: list[dict[float, tuple[float, int]]]) -> list[str]:
    """The table."""
    everything = rounds[0][0.0][1]
    cells = []
    for fraction in FRACTIONS:
        seconds, nbytes = median(one[fraction][0] for one in rounds), rounds[0][fraction][1]
        ratios = [one[fraction][0] / one[1.0][0] for one in rounds]
        cells.append(
            [
                f"{fraction:g}",
                f"{nbytes / 2**20:.2f}",
                f"{100 * nbytes / everything:.1f}",
                f"{1000 * seconds:.2f}",
                ratio(ratios),
            ]
        )
    header = ["resident", "MiB copied an epoch", "% of those at 0", "ms an epoch", "× everything resident"]
    return table(header, cells)


if __name__ == "__main__":
    main()
