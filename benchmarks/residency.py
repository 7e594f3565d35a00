"""What it costs to keep only a part of the set on the device: `gpu_slice` with `resident` from 0 to 1, without a model.

    python benchmarks/residency.py --batch-size 500 --output benchmarks/results/residency-cpu.md

In one process each fraction runs through one epoch of MNIST per round, shuffled by sample; the batches are taken and
dropped. The bytes are counted where tensors are copied to the device, and are the same on every machine. On the CPU a
copy in host memory stands for each of them, so the bytes are real, but the times are not those of a bus: only a GPU
shows those, and the uploads that overlap with its work.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from rounds import main, mnist_command_line, ratios, report, seconds_of, table, take_turns
from torch import Tensor

from vitmnist import load_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.backend import BACKENDS, CpuBackend, CudaBackend
from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
COPIES_ON_HOST = torch.device("privateuseone")
METHOD = (
    "Median of {rounds} rounds; the ratio is the median and the range of the rounds' ratios. Copied: "
    "images and labels that are not resident, 8 bytes for each image's index, and 8 for the position in its batch of "
    "each that is not resident. With everything resident, only the indices are copied, which is not counted."
)
ON_CPU = (
    "On this machine a copy in host memory stands for the bus: the bytes are real, the times are not those of a GPU."
)


class Bus:
    """The bytes that were copied to the device so far."""

    nbytes = 0


class CountingCuda(CudaBackend):
    """A CUDA device whose copies are counted."""

    def to_device(self, tensor: Tensor) -> Tensor:
        Bus.nbytes += tensor.nbytes
        return super().to_device(tensor)


class CountingHost(CpuBackend):
    """Copies within host memory, as if the device had its own."""

    is_async = True

    def use_stream(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def to_device(self, tensor: Tensor) -> Tensor:
        Bus.nbytes += tensor.nbytes
        return tensor.clone()


def run(loader: Loader, device: torch.device, number: int) -> tuple[float, int]:
    """Seconds of an epoch, whose batches are dropped, and the bytes that it copied."""
    before = Bus.nbytes
    seconds = seconds_of(lambda: [len(labels) for _, labels in loader.epoch(number)], device)
    return seconds, Bus.nbytes - before


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds; the report."""
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    sampler = EpochSampler(len(split), arguments.batch_size, 42)
    BACKENDS.update({"cuda": CountingCuda, COPIES_ON_HOST.type: CountingHost})
    counted = device if device.type == "cuda" else COPIES_ON_HOST
    with ExitStack() as stack:
        candidates = {}
        for fraction in FRACTIONS:
            values = {"name": "gpu_slice", "resident": fraction}
            loader = stack.enter_context(LOADERS.build(values, split, sampler, counted))
            candidates[fraction] = partial(run, loader, device)
        results = take_turns(candidates, arguments.rounds)
    return report(
        f"gpu_slice with a part of {len(split):,} images resident, batch {arguments.batch_size}, without a model",
        describe_environment(device),
        METHOD.format(rounds=arguments.rounds) + ("" if device.type == "cuda" else f" {ON_CPU}"),
        figures(results),
    )


def figures(results: dict[float, list[tuple[float, int]]]) -> str:
    """The table."""
    seconds = {fraction: [one[0] for one in measured] for fraction, measured in results.items()}
    nbytes = {fraction: measured[0][1] for fraction, measured in results.items()}
    rows = [
        [
            f"{fraction:g}",
            f"{nbytes[fraction] / 2**20:.2f}",
            f"{100 * nbytes[fraction] / nbytes[0.0]:.1f}",
            f"{1000 * median(seconds[fraction]):.2f}",
            ratios(seconds[fraction], seconds[1.0]),
        ]
        for fraction in results
    ]
    header = ["resident", "MiB copied an epoch", "% of those at 0", "ms an epoch", "× everything resident"]
    return table(header, rows)


if __name__ == "__main__":
    main(mnist_command_line(__doc__), compare)
