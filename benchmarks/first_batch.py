"""How long an epoch waits for its first batch, if the loader knows the number of epochs, and if it does not.

    python benchmarks/first_batch.py --train-size 10000 --output benchmarks/results/first-batch-cpu.md

A loader that knows it begins each epoch before it is asked for. Both train the articles' ViT on MNIST, in turn: a round
is a new loader and three epochs for each of them. Its figure is the mean wait of the second and the third epoch,
because the first one starts the workers. The model is evaluated between the epochs, unless the table says otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from epoch import new_step
from rounds import check_output, describe, publish, ratio, rotated, table
from tqdm import tqdm

from vitmnist import load_dataset, make_loader
from vitmnist.data.datasets import Dataset
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import UserError
from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment
from vitmnist.training.fast import StepConfig
from vitmnist.training.loop import EpochProgress, evaluate, train_epoch

EPOCHS = 3
DISK = {"name": "disk", "num_workers": 2}
CANDIDATES: dict[str, tuple[dict[str, Any], bool]] = {  # loader, whether the model is evaluated after each epoch
    "disk, 2 workers": (DISK, True),
    "disk, 2 workers, no evaluation": (DISK, False),
    "prefetch of disk, 2 workers": ({"name": "prefetch", "base": DISK}, True),
    "prefetch of ram": ({"name": "prefetch", "base": "ram"}, True),
}


def first_batch_s(name: str, epochs: int | None, dataset: Dataset, batch_size: int, device: torch.device) -> float:
    """Mean seconds of the wait for the first batch, without the first epoch; `epochs` is what the loader knows."""
    options, has_evaluation = CANDIDATES[name]
    settings: dict[str, Any] = {"batch_size": batch_size, "device": device, "seed": 42}
    waits = []
    with (
        make_loader(data=dataset.train, epochs=epochs, **options, **settings) as loader,
        make_loader("ram", dataset.test, **settings, shuffle="none") as eval_loader,
    ):
        step = new_step(loader, dataset.train, device, StepConfig())
        preprocess = Preprocess(dataset.train).to(device)
        for number in range(EPOCHS):
            metrics = train_epoch(step, loader, EpochProgress(number, loader.sampler, device))
            waits.append(metrics["first_batch_s"])
            if has_evaluation:
                evaluate(step.eval_model, eval_loader, preprocess)
    return fmean(waits[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that does not count")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; default: all")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for the files of disk")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    check_output(parser, arguments.output)
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the table."""
    device, size = choose_device(arguments.device), arguments.batch_size
    dataset = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size, test_size=2000)
    rounds = []
    for number in tqdm(range(arguments.rounds + 1), desc="round"):
        rounds.append(
            {
                (name, epochs): first_batch_s(name, epochs, dataset, size, device)
                for name in rotated([*CANDIDATES], number)
                for epochs in rotated([None, EPOCHS], number)
            }
        )
    rows = []
    for name in CANDIDATES:
        unknown, known = ([waits[name, epochs] for waits in rounds[1:]] for epochs in (None, EPOCHS))
        ratios = [one / other for one, other in zip(known, unknown, strict=True)]
        rows.append([name, *(f"{1000 * median(seconds):.1f}" for seconds in (unknown, known)), ratio(ratios)])
    header = ["loader", "number unknown, ms", "number known, ms", "ratio"]
    title = f"# The wait for the first batch of an epoch, {len(dataset.train):,} images at batch {size}"
    method = f"Median of {arguments.rounds} rounds; a ratio is the median of the rounds' ratios, with their range."
    publish(
        "\n".join([title, "", describe(describe_environment(device), method), "", *table(header, rows), ""]),
        arguments.output,
    )


if __name__ == "__main__":
    main()
