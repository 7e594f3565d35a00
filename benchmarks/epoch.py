"""How long a training epoch takes: this project next to a hand-written loop, the articles' loop, and Lightning.

    python benchmarks/epoch.py --batch-size 500 --rounds 5 --output benchmarks/results/epoch-bs500.md
    python benchmarks/epoch.py --only bare article trainer=fast --compile      some of the candidates

Every candidate has a process of its own, so that it cannot profit from what another one changed in the allocator or in
a library. One at a time, while the others are idle, each trains the articles' ViT on MNIST for a few epochs per round:
one on a CPU; on a GPU, where an epoch is short, ten or as many as take two seconds, after half a second of epochs that
raise the clocks of an idle GPU.
A ratio compares epochs of the same round, so that a machine that slows down affects both. The first round does not
count, and compilation comes before it. The loop over one resident batch is the training loop without any loading.

The clock includes taking the batches, normalisation, forward, backward and optimizer step, until the device is idle. It
excludes evaluation, set-up, compilation, and the start of workers that persist from epoch to epoch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import article
import torch
from loops import LR, Epoch, article_loop, bare_loop, lightning_loop, new_model
from rounds import check_output, describe, publish, raise_clocks, ratio, rotated, table
from tqdm import tqdm

from vitmnist import Loader, load_dataset, make_loader
from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.data.datasets import Split
from vitmnist.data.loaders import LOADERS
from vitmnist.data.loaders.timing import ResidentBatch
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import UserError
from vitmnist.models.vit import ViT
from vitmnist.optim.optimizers import AdamOptions, adam
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.allocator import freed_memory_kept
from vitmnist.runtime.device import accelerator_of, choose_device
from vitmnist.tracking.environment import describe_environment
from vitmnist.training.cuda_graph import capture_step
from vitmnist.training.fast import StepConfig, resolve_step_config
from vitmnist.training.loop import EpochProgress, train_epoch
from vitmnist.training.step import TrainStep

BARE = "bare loop"
RESIDENT = "one resident batch"
ARTICLE = "article's loop, RAM"
TURN_EPOCHS, TURN_S = 10, 2.0  # on a GPU, the most epochs of a turn, and the seconds after which none is added

Builder = Callable[[], tuple[Epoch, str]]
"""Sets up a candidate; returns the function that trains it for an epoch, and a remark for the report."""


def our_loop(
    new_loader: Callable[[], Loader],
    split: Split,
    device: torch.device,
    choose: Callable[[], StepConfig],
    stack: ExitStack,
) -> tuple[Epoch, str]:
    """This project's training loop with one loader.

    Args:
        stack: Closes the loader when the candidate's process ends.
    """
    if device.type == "cpu":
        stack.enter_context(freed_memory_kept())  # as in a run
    loader, config = stack.enter_context(new_loader()), choose()
    step = new_step(loader, split, device, config)

    def epoch(number: int) -> tuple[float, float]:
        metrics = train_epoch(step, loader, EpochProgress(number, loader.sampler, device))
        return metrics["train_s"], metrics["data_wait_pct"]

    remark = config.describe().replace("\n", "; ")
    return epoch, remark + (f"; compilation and graph capture took {step.compile_s:.1f} s" if step.compile_s else "")


def new_step(loader: Loader, split: Split, device: torch.device, config: StepConfig) -> TrainStep:
    """The training step of the articles' model with Adam, compiled and captured as configured.

    Raises:
        UserError: The step cannot be compiled.
    """
    model = new_model(split, device)
    optimizer = adam(AdamOptions(lr=LR), model, config.fused)
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, sys.maxsize)
    size = min(loader.sampler.batch_size, loader.sampler.size)
    step = TrainStep(model, Preprocess(split).to(device), optimizer, schedule, size, config)
    if config.compile:
        try:
            with closing(loader.epoch(0)) as batches:
                step.compile(next(batches), None)
        except RuntimeError as error:
            raise UserError(f"--compile: {error}") from error
    if config.cuda_graph:
        capture_step(step, loader, accelerator_of(device))
    return step


def fast(split: Split, batch_size: int, device: torch.device, compiling: bool) -> StepConfig:
    """The options that `trainer=fast` chooses."""
    config = TrainerConfig("auto", compiling, Precision.auto, "auto", "auto")
    return resolve_step_config(config, device, min(batch_size, len(split)), len(split))


def candidates(
    split: Split, device: torch.device, arguments: argparse.Namespace, stack: ExitStack
) -> dict[str, Builder]:
    """What sets up each candidate, by name; `stack` closes what it opens."""
    size: int = arguments.batch_size
    theirs: dict[str, Callable[[], Epoch]] = {BARE: partial(bare_loop, split, size, device)}
    for way, batches in article.WAYS.items():
        theirs[f"article's loop, {way}"] = partial(article_loop, split, size, device, batches)
    theirs[f"{ARTICLE}, our model"] = partial(article_loop, split, size, device, article.ram, ViT)
    if find_spec("lightning"):
        theirs["Lightning"] = partial(lightning_loop, split, size, device)
    builders: dict[str, Builder] = {name: partial(_without_remark, build) for name, build in theirs.items()}
    resident = ResidentBatch(split, EpochSampler(len(split), size, 42), device)
    builders[RESIDENT] = partial(our_loop, lambda: resident, split, device, StepConfig, stack)

    def ours(label: str, choose: Callable[[], StepConfig] = StepConfig, **options: Any) -> None:
        name = re.split("[ ,]", label)[0]
        new_loader = partial(make_loader, name, split, batch_size=size, device=device, seed=42, **options)
        builders[label] = partial(our_loop, new_loader, split, device, choose, stack)

    ours("gpu_slice")
    ours("ram")
    ours("prefetch of ram", base="ram")
    ours("cache", folder=f"{arguments.root}/vitmnist-cache")
    for workers in arguments.num_workers:
        ours(f"disk, {workers} workers", num_workers=workers)
    for name in LOADERS.names():  # registered loaders that are not listed above, with their default options
        if name != "auto" and not any(re.match(rf"{name}\b", label) for label in builders):
            ours(name)
    ours("gpu_slice, trainer=fast", partial(fast, split, size, device, compiling=False))
    if arguments.compile:
        ours("gpu_slice, trainer=fast, compiled", partial(fast, split, size, device, compiling=True))
    return builders


def _without_remark(build: Callable[[], Epoch]) -> tuple[Epoch, str]:
    return build(), ""


class CandidateProcess:
    """A candidate in a process of its own, idle until its turn. Use as a context manager.

    Raises:
        UserError: It could not be set up.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, arguments), daemon=False)
        self._process.start()
        theirs.close()
        self.remark: str = self._answer()

    def turn(self, number: int) -> tuple[float, float]:
        """Train for the epochs of a round; returns their mean, see `Epoch`."""
        self._connection.send(number)
        seconds, waiting = self._answer()
        return seconds, waiting

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError as error:
            hint = "use --only to compare fewer candidates, which need less memory"
            raise UserError(f"{self._name}: its process has died; {hint}") from error
        if isinstance(answer, UserError):
            raise answer
        return answer

    def __enter__(self) -> CandidateProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()
        self._process.join()


def serve(connection: Connection, name: str, arguments: argparse.Namespace) -> None:
    """In a candidate's process: train for each round whose number is received, until the connection is closed."""
    try:
        device = choose_device(arguments.device)
        split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
        with ExitStack() as stack, suppress(EOFError):
            epoch, remark = candidates(split, device, arguments, stack)[name]()
            connection.send(remark)
            while True:
                connection.send(train_turn(epoch, connection.recv(), device))
    except UserError as error:
        connection.send(error)


def train_turn(epoch: Epoch, number: int, device: torch.device) -> tuple[float, float]:
    """The mean of consecutive epochs, on a GPU after others that bring it to its working clocks."""
    raise_clocks(lambda: epoch(number), device)
    done = [epoch(number)]
    while device.type == "cuda" and len(done) < TURN_EPOCHS and sum(seconds for seconds, _ in done) < TURN_S:
        done.append(epoch(number))
    seconds, waiting = zip(*done, strict=True)
    return fmean(seconds), fmean(waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that does not count")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-workers", type=int, nargs="*", default=[0, 2], help="one disk candidate for each")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; default: all")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="candidates whose name contains one of these")
    parser.add_argument("--compile", action="store_true", help="add a compiled candidate, which takes a minute")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for the files of disk and cache")
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
    """Run the rounds; print and write the table.

    Raises:
        UserError: The device, a size, a candidate or a number of workers is not possible.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    known = candidates(split, device, arguments, ExitStack())
    names = [name for name in known if not arguments.only or any(text in name for text in arguments.only)]
    if not names:
        raise UserError(f"--only {' '.join(arguments.only)}: none of {'; '.join(known)}")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(CandidateProcess(name, arguments)) for name in tqdm(names, desc="set-up")
        }
        rounds = [
            {name: processes[name].turn(number) for name in rotated(names, number)}
            for number in tqdm(range(arguments.rounds + 1), desc="round")
        ]
    title = f"# A training epoch of {len(split):,} images at batch {arguments.batch_size}"
    method = f"Median of {arguments.rounds} rounds; a ratio is the median of the rounds' ratios, with their range."
    lines = [title, "", describe(describe_environment(device), method), "", *figures(names, rounds[1:]), ""]
    for name in names:
        if processes[name].remark:
            lines += [f"`{name}`: {processes[name].remark}", ""]
    publish("\n".join(lines), arguments.output)


def figures(names: list[str], rounds: list[dict[str, tuple[float, float]]]) -> list[str]:
    """The lines of the table: median milliseconds, ratios to the reference candidates, share of waiting."""
    references = [name for name in (BARE, RESIDENT, ARTICLE) if name in names]
    rows = []
    for name in names:
        seconds = [epochs[name][0] for epochs in rounds]
        waiting = median(epochs[name][1] for epochs in rounds)
        rows.append(
            [
                name,
                f"{1000 * median(seconds):,.1f}",
                *(ratio([epochs[name][0] / epochs[other][0] for epochs in rounds]) for other in references),
                "–" if math.isnan(waiting) else f"{waiting:.1f}%",
            ]
        )
    return table(["candidate", "ms", *(f"× {name}" for name in references), "waiting for data"], rows)


if __name__ == "__main__":
    main()
