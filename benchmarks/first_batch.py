"""How long an epoch waits for its first batch, if `prefetch` knows the number of epochs, and if it does not.

    python benchmarks/first_batch.py --train-size 10000 --output benchmarks/results/first-batch-cpu.md

`prefetch` that knows it begins each epoch early. Both train the articles' ViT on MNIST, in turn: a round
is a new loader and three epochs for each of them. Its figure is the mean wait of the second and the third epoch,
because the first one starts the workers. The model is evaluated between the epochs, unless the table says otherwise.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median

from epoch import common_overrides
from loops import new_setup
from rounds import main, mnist_command_line, ratios, report, rotated, table, take_turns

from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment
from vitmnist.training.loop import EpochProgress, evaluate, train_epoch

EPOCHS = 3
PREFETCH_OF_DISK = ["data/loader=prefetch", "data/loader@data.loader.base=disk", "data.loader.base.num_workers=2"]
CANDIDATES = {  # overrides, whether the model is evaluated after each epoch
    "prefetch of disk, 2 workers": (PREFETCH_OF_DISK, True),
    "prefetch of disk, 2 workers, no evaluation": (PREFETCH_OF_DISK, False),
    "prefetch of ram": (["data/loader=prefetch"], True),
}


def first_batch_s(overrides: list[str], has_evaluation: bool, epochs: int | None) -> float:
    """Mean seconds of the wait for the first batch, without the first epoch; `epochs` is what the loader knows."""
    waits = []
    with ExitStack() as stack:
        setup = new_setup(overrides, stack)
        step, loader = setup.step, setup.train_loader
        loader.epochs = epochs
        for number in range(EPOCHS):
            metrics = train_epoch(step, loader, EpochProgress(number, loader.sampler, step.device))
            waits.append(metrics["first_batch_s"])
            if has_evaluation:
                evaluate(step.eval_model, setup.eval_loader, setup.step.preprocess)
    return fmean(waits[1:])


def both(overrides: list[str], has_evaluation: bool, number: int) -> dict[int | None, float]:
    """The waits without and with a known number of epochs, in a round."""
    return {epochs: first_batch_s(overrides, has_evaluation, epochs) for epochs in rotated([None, EPOCHS], number)}


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds; the report."""
    common = [*common_overrides(arguments), f"data.dataset.test_size={(arguments.train_size or 10_000) // 5}"]
    candidates = {
        name: partial(both, [*common, *own], has_evaluation) for name, (own, has_evaluation) in CANDIDATES.items()
    }
    rows = []
    for name, waits in take_turns(candidates, arguments.rounds).items():
        unknown, known = ([wait[epochs] for wait in waits] for epochs in (None, EPOCHS))
        medians = (f"{1000 * median(seconds):.1f}" for seconds in (unknown, known))
        rows.append([name, *medians, ratios(known, unknown)])
    size = f"{arguments.train_size:,}" if arguments.train_size else "all"
    return report(
        f"The wait for the first batch of an epoch, {size} images at batch {arguments.batch_size}",
        describe_environment(choose_device(arguments.device)),
        f"Median of {arguments.rounds} rounds; a ratio is the median of the rounds' ratios, with their range.",
        table(["loader", "number unknown, ms", "number known, ms", "ratio"], rows),
    )


if __name__ == "__main__":
    main(mnist_command_line(__doc__), compare)
