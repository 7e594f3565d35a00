"""Times a training epoch of this project, a hand-written loop, the articles' loop, and Lightning.

    python benchmarks/epoch.py --batch-size 500 --rounds 5 --output benchmarks/results/epoch-bs500.md
    python benchmarks/epoch.py --only hand article trainer=fast --compile      some of the candidates

Every candidate trains the articles' ViT on MNIST in its own process, an epoch per round, while the others are idle. On
a GPU, where epochs are short, it trains for ten epochs per round, or for as many as take two seconds, after half a
second of epochs that raise the clocks of the GPU. "one resident batch" is the training loop of this project without
loading. benchmarks/README.md describes the method.

The time includes fetching batches, normalisation, forward, backward and optimizer step, until the device is idle. It
excludes evaluation, set-up, compilation, and the start of workers that persist from epoch to epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import article
import torch
from loops import Epoch, build_hand_written_loop, build_lightning_loop, build_our_loop
from rounds import create_mnist_parser, format_ratios, format_report, format_table, main, raise_clocks, take_turns
from tqdm import tqdm

from vitmnist import load_dataset
from vitmnist.data.datasets.base import Split
from vitmnist.errors import UserError
from vitmnist.loaders.base import LOADERS
from vitmnist.models.vit import ViT
from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment

HAND_WRITTEN = "hand-written loop"
RESIDENT = "one resident batch"
ARTICLE = "article's loop, RAM"
TURN_EPOCHS, TURN_S = 10, 2.0
"""On a GPU, the maximum number of epochs in a turn, and the time after which no epoch is added (s)."""

Builder = Callable[[], tuple[Epoch, str]]
"""Sets up a candidate, and returns a function that trains it for an epoch and a remark for the report."""


def list_common_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the options as overrides of `train.py`. The test set is small, because evaluation is not timed."""
    return [
        f"batch_size={arguments.batch_size}",
        f"device={arguments.device}",
        f"data.root={json.dumps(arguments.root)}",
        f"data.dataset.train_size={arguments.train_size or 'null'}",
        "data.dataset.test_size=100",
    ]


def list_our_overrides(num_workers: list[int], compiling: bool) -> dict[str, list[str]]:
    """Return the overrides of each candidate that runs the loop of this project."""
    overrides = {
        "gpu_slice": ["data/loader=gpu_slice"],
        "ram": ["data/loader=ram"],
        "prefetch of ram": ["data/loader=prefetch"],
        "cache": ["data/loader=cache"],
    }
    for workers in num_workers:
        overrides[f"disk, {workers} workers"] = ["data/loader=disk", f"data.loader.num_workers={workers}"]
    for name in LOADERS.members():  # Add all other registered loaders with their default options.
        if name != "auto" and not any(re.match(rf"{name}\b", label) for label in overrides):
            overrides[name] = [f"data/loader={name}"]
    fast = ["data/loader=gpu_slice", "trainer=fast"]
    overrides["gpu_slice, trainer=fast"] = [*fast, "trainer.compile=false"]
    if compiling:
        overrides["gpu_slice, trainer=fast, compiled"] = [*fast, "trainer.compile=true"]
    return overrides


def get_builders(
    split: Split, device: torch.device, arguments: argparse.Namespace, stack: ExitStack
) -> dict[str, Builder]:
    """Return the `Builder` of each candidate, by name. `stack` closes their loaders."""
    baselines: dict[str, Callable[[Split, int, torch.device], Epoch]] = {HAND_WRITTEN: build_hand_written_loop}
    for name, way in article.WAYS.items():
        baselines[f"article's loop, {name}"] = partial(article.build_article_loop, way, article.ArticleViT)
    baselines[f"{ARTICLE}, our model"] = partial(article.build_article_loop, article.ram, ViT)
    if find_spec("lightning"):
        baselines["Lightning"] = build_lightning_loop
    common = list_common_overrides(arguments)
    return {
        **{
            name: partial(_build_without_remark, loop, split, arguments.batch_size, device)
            for name, loop in baselines.items()
        },
        RESIDENT: partial(build_our_loop, common, stack, is_resident=True),
        **{
            name: partial(build_our_loop, [*common, *overrides], stack)
            for name, overrides in list_our_overrides(arguments.num_workers, arguments.compile).items()
        },
    }


def _build_without_remark(loop: Callable[..., Epoch], *settings: Any) -> tuple[Epoch, str]:
    return loop(*settings), ""


class CandidateProcess:
    """A candidate in its own process, idle until its turn; a context manager that ends the process.

    Raises:
        UserError: the candidate cannot be set up.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(target=serve, args=(child_connection, name, arguments), daemon=False)
        self._process.start()
        child_connection.close()
        self.remark: str = self._answer()

    def turn(self, number: int) -> tuple[float, float]:
        """Train for the epochs of a round; return the mean seconds and the mean percentage of waiting (see `Epoch`)."""
        self._connection.send(number)
        seconds, waiting = self._answer()
        return seconds, waiting

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError as error:
            hint = "if memory ran out, compare fewer candidates with --only"
            raise UserError(f"{self._name}: its process was killed; {hint}") from error
        if isinstance(answer, UserError):
            raise answer
        return answer

    def __enter__(self) -> CandidateProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()
        self._process.join()


def serve(connection: Connection, name: str, arguments: argparse.Namespace) -> None:
    """Run the process of a candidate: train a turn for each received number, until the connection is closed."""
    try:
        device = choose_device(arguments.device)
        split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
        with ExitStack() as stack, suppress(EOFError):
            epoch, remark = get_builders(split, device, arguments, stack)[name]()
            connection.send(remark)
            while True:
                connection.send(train_turn(epoch, connection.recv(), device))
    except UserError as error:
        connection.send(error)


def train_turn(epoch: Epoch, number: int, device: torch.device) -> tuple[float, float]:
    """Return the means over consecutive epochs. On a GPU, untimed epochs raise its clocks first."""
    raise_clocks(lambda: epoch(number), device)
    timed = [epoch(number)]
    while device.type == "cuda" and len(timed) < TURN_EPOCHS and sum(seconds for seconds, _ in timed) < TURN_S:
        timed.append(epoch(number))
    seconds, waiting = zip(*timed, strict=True)
    return fmean(seconds), fmean(waiting)


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds and return the report."""
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    builders = get_builders(split, device, arguments, ExitStack())
    names = [name for name in builders if not arguments.only or any(text in name for text in arguments.only)]
    if not names:
        raise UserError(f"--only {' '.join(arguments.only)}: matches no candidate; candidates: {'; '.join(builders)}")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(CandidateProcess(name, arguments)) for name in tqdm(names, desc="set-up")
        }
        turns = take_turns({name: process.turn for name, process in processes.items()}, arguments.rounds)
    return format_report(
        f"A training epoch of {len(split):,} images at batch size {arguments.batch_size}",
        describe_environment(device),
        f"Median of {arguments.rounds} rounds; a ratio is the median of the rounds' ratios, with their range.",
        format_turns(turns),
        *(f"`{name}`: {process.remark}" for name, process in processes.items() if process.remark),
    )


def format_turns(turns: dict[str, list[tuple[float, float]]]) -> str:
    """Format the table: median milliseconds, ratios to the reference candidates, share of waiting."""
    seconds = {name: [turn[0] for turn in measured] for name, measured in turns.items()}
    references = [name for name in (HAND_WRITTEN, RESIDENT, ARTICLE) if name in turns]
    rows = []
    for name, measured in turns.items():
        waiting = median(turn[1] for turn in measured)
        rows.append(
            [
                name,
                f"{1000 * median(seconds[name]):,.1f}",
                *(format_ratios(seconds[name], seconds[other]) for other in references),
                "–" if math.isnan(waiting) else f"{waiting:.1f}%",
            ]
        )
    return format_table(["candidate", "ms", *(f"× {name}" for name in references), "waiting for data"], rows)


if __name__ == "__main__":
    parser = create_mnist_parser(__doc__)
    parser.add_argument("--num-workers", type=int, nargs="*", default=[0, 2], help="a disk candidate for each number")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="candidates whose name contains one of these")
    parser.add_argument("--compile", action="store_true", help="add a compiled candidate, which takes a minute")
    main(parser, compare)
