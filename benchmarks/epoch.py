"""How long a training epoch takes with each loader, beside a loop written by hand.

    python benchmarks/epoch.py --batch-size 500 --rounds 5 --output benchmarks/results/epoch-bs500.md

In one process every candidate trains one epoch of the articles' ViT on MNIST, in turn, once a round; a round's ratio is
a candidate's epoch over the hand-written loop's epoch of the same round, so that a machine that slows down slows all of
them. The loop over one resident batch is the engine without any loading: what is left when data cost nothing. The first
round is left out. Medians and the range of the ratios are written as Markdown.

Inside the clock: taking the batches, normalising, forward, backward and optimizer step, up to the moment when the
device is done. Not inside: evaluation, setting up, and starting the workers that `disk` keeps from epoch to epoch.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from vitmnist import Loader, engine, load_dataset, make_loader
from vitmnist.accelerator import choose_device
from vitmnist.clock import synchronize
from vitmnist.data.datasets import Split
from vitmnist.data.loaders.auto import Resident
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import UserError
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optimizer import AdamOptions, adam
from vitmnist.records.environment import describe_environment
from vitmnist.schedule import SCHEDULES

BARE = "bare loop"
RESIDENT = "one resident batch"

Epoch = Callable[[int], tuple[float, float]]
"""Trains epoch number n; gives its seconds and the percentage of them spent waiting for data."""


def new_model(split: Split, device: torch.device) -> torch.nn.Module:
    """The articles' ViT, always with the same weights."""
    torch.manual_seed(42)
    _, channels, height, width = split.images.shape
    return ViT(ViTOptions(), (channels, height, width), len(split.classes)).to(device)


def bare_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """What one writes by hand for a normalised float32 set on the device."""
    model = new_model(split, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    images = Preprocess(split)(split.images).to(device)
    labels = split.labels.to(device)

    def epoch(number: int) -> tuple[float, float]:
        synchronize(device)
        started = time.perf_counter()
        total = torch.zeros((), device=device)
        permutation = torch.randperm(len(images), device=device)
        for start in range(0, len(images), batch_size):
            indices = permutation[start : start + batch_size]
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()
        return time.perf_counter() - started, float("nan")

    return epoch


def our_loop(loader: Loader, split: Split, device: torch.device) -> Epoch:
    """The engine with one loader."""
    model = new_model(split, device)
    optimizer = adam(AdamOptions(), model.parameters())
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, sys.maxsize)
    preprocess = Preprocess(split).to(device)

    def epoch(number: int) -> tuple[float, float]:
        current = engine.TrainingPass(number, len(loader), device)
        parts = (model, loader, current, preprocess, optimizer, schedule, device)
        figures = engine.train_epoch(*parts, advance=lambda: None)
        return figures.seconds, 100 * figures.data_wait_s / figures.seconds

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-workers", type=int, nargs="*", default=[0, 2], help="for disk: one candidate each")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; all if not given")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="where disk keeps the unpacked set")
    parser.add_argument("--output", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the table.

    Raises:
        UserError: a device, a size or a number of workers that cannot be.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    options: dict[str, dict[str, Any]] = {
        "gpu_slice": {},
        "ram": {},
        "prefetch of ram": {"base": "ram"},
        "cache": {"folder": f"{arguments.root}/vitmnist-cache"},
        **{f"disk, {workers} workers": {"num_workers": workers} for workers in arguments.num_workers},
    }
    order = {"batch_size": arguments.batch_size, "device": device, "seed": 42}
    with ExitStack() as stack:
        candidates = {BARE: bare_loop(split, arguments.batch_size, device)}
        resident = Resident(split, EpochOrder(len(split), arguments.batch_size, 42), device)
        candidates[RESIDENT] = our_loop(resident, split, device)
        for name, own in options.items():
            loader = make_loader(re.split("[ ,]", name)[0], split, **order, **own)
            candidates[name] = our_loop(stack.enter_context(loader), split, device)
        names = list(candidates)
        rounds = []
        for number in tqdm(range(arguments.rounds + 1), desc="round"):
            turn = number % len(names)  # another one goes first each round: no place in the order is a candidate's own
            figures = {name: candidates[name](number) for name in names[turn:] + names[:turn]}
            rounds.append({name: figures[name] for name in names})
    report = markdown(rounds[1:], split, arguments.batch_size, device)
    print(report, end="")
    if arguments.output:
        arguments.output.write_text(report)


def markdown(rounds: list[dict[str, tuple[float, float]]], split: Split, batch_size: int, device: torch.device) -> str:
    """The table, under the machine and the versions that it holds for."""
    machine = describe_environment(device)
    lines = [
        f"# A training epoch of {len(split):,} images at batch {batch_size}, by loader",
        "",
        f"{date.today()}, {machine['gpu'] or machine['cpu']}, {machine['cpu_count']} CPU cores, "
        f"torch {machine['torch']}, Python {machine['python']}, commit {str(machine['git_commit'])[:10]}"
        f"{' and changes' if machine['git_dirty'] else ''}. Median of {len(rounds)} rounds; the ratio is the median of "
        f"the rounds' ratios. Written by `{shlex.join(['python', *sys.argv])}`.",
        "",
        "| candidate | seconds | × bare loop | range of the ratio | × one resident batch | waiting for data |",
        "|---|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        seconds = [figures[name][0] for figures in rounds]
        ratios = [figures[name][0] / figures[BARE][0] for figures in rounds]
        alone = median(figures[name][0] / figures[RESIDENT][0] for figures in rounds)
        wait = "–" if name == BARE else f"{median(figures[name][1] for figures in rounds):.1f}%"
        spread = f"{min(ratios):.3f}–{max(ratios):.3f}"
        lines.append(f"| {name} | {median(seconds):.2f} | {median(ratios):.3f} | {spread} | {alone:.3f} | {wait} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
