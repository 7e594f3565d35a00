"""How long a training epoch takes: this program beside a loop written by hand, the articles', and Lightning's.

    python benchmarks/epoch.py --batch-size 500 --rounds 5 --output benchmarks/results/epoch-bs500.md
    python benchmarks/epoch.py --only bare article trainer=fast --compile      part of it

Every candidate has a process of its own, in which nothing else has changed the allocator or the libraries. Strictly one
after the other, all others at rest, each trains one epoch of the articles' ViT on MNIST, once a round. A round's ratio
is a candidate's epoch over another's of the same round, so that a machine that slows down slows all of them. The first
round is left out, and what is compiled is compiled before it. The loop over one resident batch is the engine without
any loading: what is left when data cost nothing. Medians and the range of the ratios are written as Markdown.

Inside the clock: taking the batches, normalising, forward, backward and optimizer step, up to the moment when the
device is done. Not inside: evaluation, setting up, compiling, and starting workers that stay from epoch to epoch.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import multiprocessing
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import article
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from vitmnist import Loader, load_dataset, make_loader
from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.data.datasets import Split
from vitmnist.data.loaders import LOADERS
from vitmnist.data.loaders.timing import resident_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import UserError
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.optimizers import AdamOptions, adam
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.allocator import freed_memory_kept
from vitmnist.runtime.device import accelerator_of, choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment
from vitmnist.training import loop
from vitmnist.training.fast import StepConfig, decide, timer
from vitmnist.training.step import Gradient, Step

BARE = "bare loop"
RESIDENT = "one resident batch"
ARTICLE = "article's loop, RAM"
LR = 0.003

Epoch = Callable[[int], tuple[float, float]]
"""Trains epoch number n; gives its seconds and the percentage of them spent waiting for data."""

Builder = Callable[[], tuple[Epoch, str]]
"""Sets a candidate up; gives what trains an epoch, and a remark."""


def new_model(split: Split, device: torch.device, kind: type[ViT] = ViT) -> torch.nn.Module:
    """The articles' ViT, always with the same weights."""
    torch.manual_seed(42)
    _, channels, height, width = split.images.shape
    return kind(ViTOptions(), (channels, height, width), len(split.classes)).to(device)


def bare_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """What one writes by hand for a normalised float32 set on the device."""
    model = new_model(split, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
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


def article_loop(
    split: Split,
    batch_size: int,
    device: torch.device,
    way: Callable[[Split, int, torch.device], article.Batches],
    kind: type[ViT],
) -> tuple[Epoch, str]:
    """The articles' loop over one of their ways of loading."""
    model = new_model(split, device, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = way(split, batch_size, device)

    def epoch(number: int) -> tuple[float, float]:
        synchronize(device)
        started = time.perf_counter()
        article.train(model, optimizer, batches, device)
        synchronize(device)
        return time.perf_counter() - started, float("nan")

    return epoch, ""


def lightning_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """Lightning's `Trainer` with all that it records turned off, over a `DataLoader(TensorDataset)`."""
    import lightning  # an extra

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    model = new_model(split, device)
    dataset = TensorDataset(Preprocess(split)(split.images), split.labels)
    loader = DataLoader(dataset, batch_size, shuffle=True, pin_memory=device.type == "cuda")
    seconds = 0.0

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), lr=LR)

        def on_train_epoch_start(self) -> None:
            synchronize(device)
            self.started = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            nonlocal seconds
            synchronize(device)
            seconds = time.perf_counter() - self.started

    trainer = lightning.StepConfig(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()

    def epoch(number: int) -> tuple[float, float]:
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, loader)
        return seconds, float("nan")

    return epoch


def our_loop(
    new_loader: Callable[[], Loader],
    split: Split,
    device: torch.device,
    choose: Callable[[], StepConfig],
    own: ExitStack,
) -> tuple[Epoch, str]:
    """The engine with one loader; and what was decided of its step.

    Args:
        own: of the process, which it ends with.
    """
    if device.type == "cpu":
        own.enter_context(freed_memory_kept())  # as a run does
    loader, trainer = own.enter_context(new_loader()), choose()
    model = new_model(split, device)
    optimizer = adam(AdamOptions(lr=LR), model, trainer.fused)
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, sys.maxsize)
    size = min(loader.sampler.batch_size, loader.sampler.size)
    gradient = Gradient(model, Preprocess(split).to(device), size, trainer.micro_batch, trainer.precision)
    step = Step(gradient, optimizer, schedule)
    if trainer.compile:
        with closing(loader.epoch(0)) as batches:
            reason = gradient.compile(*next(batches), None)
        if reason:
            raise UserError(f"--compile: {reason}")
    if trainer.cuda_graph:
        step.capture(loader, accelerator_of(device))

    def epoch(number: int) -> tuple[float, float]:
        current = loop.TrainingPass(number, len(loader), device)
        figures = loop.train_epoch(step, loader, current, device)
        return figures.seconds, 100 * figures.data_wait_s / figures.seconds

    remark = trainer.lines().replace("\n", "; ")
    if gradient.compile_s:
        remark += f"; compiling and recording took {gradient.compile_s:.1f} s"
    return epoch, remark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-workers", type=int, nargs="*", default=[0, 2], help="for disk: one candidate each")
    parser.add_argument("--train-size", type=int, default=None, help="the first N images; all if not given")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="candidates whose name contains one of these")
    parser.add_argument("--compile", action="store_true", help="a candidate that is compiled too, which takes a minute")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="where disk keeps the unpacked set")
    parser.add_argument("--output", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.output and not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds; print and write the table.

    Raises:
        UserError: a device, a size, a candidate or a number of workers that cannot be.
    """
    device = choose_device(arguments.device)
    split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
    builders = candidates(split, device, arguments, ExitStack())
    names = [name for name in builders if not arguments.only or any(text in name for text in arguments.only)]
    if not names:
        raise UserError(f"--only {' '.join(arguments.only)}: none of {'; '.join(builders)}")
    with ExitStack() as stack:
        rivals = {name: stack.enter_context(Rival(name, arguments)) for name in tqdm(names, desc="set-up")}
        rounds = []
        for number in tqdm(range(arguments.rounds + 1), desc="round"):
            turn = number % len(names)  # another one goes first each round: no place in the order is a candidate's own
            figures = {name: rivals[name].epoch(number) for name in names[turn:] + names[:turn]}
            rounds.append({name: figures[name] for name in names})
    notes = [f"`{name}`: {rival.remark}" for name, rival in rivals.items() if rival.remark]
    report = markdown(rounds[1:], split, arguments.batch_size, device) + "".join(f"\n{note}\n" for note in notes)
    print(report, end="")
    if arguments.output:
        arguments.output.write_text(report)


class Rival:
    """A candidate in a process of its own, which rests until it is asked for an epoch; a context manager.

    Raises:
        UserError: it could not be set up; says why.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, arguments), daemon=False)
        self._process.start()
        theirs.close()
        self.remark: str = self._answer()

    def epoch(self, number: int) -> tuple[float, float]:
        """Let it train; as `Epoch`."""
        self._connection.send(number)
        figures: tuple[float, float] = self._answer()
        return figures

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError as error:
            raise UserError(
                f"{self._name}: its process has died; --only compares fewer, which need less memory"
            ) from error
        if isinstance(answer, UserError):
            raise answer
        return answer

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()
        self._process.join()


def serve(connection: Connection, name: str, arguments: argparse.Namespace) -> None:
    """A rival's process: answers each number of an epoch with its figures, until the other end is closed."""
    try:
        device = choose_device(arguments.device)
        split = load_dataset("mnist", root=arguments.root, train_size=arguments.train_size).train
        with ExitStack() as own, suppress(EOFError):
            epoch, remark = candidates(split, device, arguments, own)[name]()
            connection.send(remark)
            while True:
                connection.send(epoch(connection.recv()))
    except UserError as error:
        connection.send(error)


def candidates(split: Split, device: torch.device, arguments: argparse.Namespace, own: ExitStack) -> dict[str, Builder]:
    """What sets each candidate up, by its name; `own` closes what it opens."""
    size: int = arguments.batch_size
    builders: dict[str, Builder] = {BARE: lambda: (bare_loop(split, size, device), "")}
    for way, batches in article.WAYS.items():
        builders[f"article's loop, {way}"] = partial(article_loop, split, size, device, batches, article.ArticleViT)
    builders[f"{ARTICLE}, our model"] = partial(article_loop, split, size, device, article.ram, ViT)
    if importlib.util.find_spec("lightning"):
        builders["Lightning"] = lambda: (lightning_loop(split, size, device), "")
    resident = resident_loader(split, EpochSampler(len(split), size, 42), device)
    builders[RESIDENT] = partial(our_loop, lambda: resident, split, device, StepConfig, own)

    def ours(label: str, trainer: Callable[[], StepConfig] = StepConfig, **options: Any) -> None:
        name = re.split("[ ,]", label)[0]
        new_loader = partial(make_loader, name, split, batch_size=size, device=device, seed=42, **options)
        builders[label] = partial(our_loop, new_loader, split, device, trainer, own)

    ours("gpu_slice")
    ours("ram")
    ours("prefetch of ram", base="ram")
    ours("cache", folder=f"{arguments.root}/vitmnist-cache")
    for workers in arguments.num_workers:
        ours(f"disk, {workers} workers", num_workers=workers)
    for name in LOADERS.names():  # loaders that were added to ours, with their defaults
        if name != "auto" and not any(re.match(rf"{name}\b", label) for label in builders):
            ours(name)
    ours("gpu_slice, trainer=fast", partial(fast, split, size, device, compiling=False))
    if arguments.compile:
        ours("gpu_slice, trainer=fast, compiled", partial(fast, split, size, device, compiling=True))
    return builders


def fast(split: Split, batch_size: int, device: torch.device, compiling: bool) -> StepConfig:
    """What `trainer=fast` comes down to."""
    sample = split.images[:batch_size].to(device), split.labels[:batch_size].to(device), None
    config = TrainerConfig("auto", compiling, Precision.auto, "auto", "auto")
    seconds = timer(new_model(split, device), Preprocess(split).to(device), lambda: sample)
    return decide(config, device, min(batch_size, len(split)), len(split), seconds)


def markdown(rounds: list[dict[str, tuple[float, float]]], split: Split, batch_size: int, device: torch.device) -> str:
    """The table, under the machine and the versions that it holds for."""
    machine = describe_environment(device)
    references = [name for name in (BARE, RESIDENT, ARTICLE) if name in rounds[0]]
    lines = [
        f"# A training epoch of {len(split):,} images at batch {batch_size}",
        "",
        f"{date.today()}, {machine['gpu'] or machine['cpu']}, {machine['cpu_count']} CPU cores, "
        f"torch {machine['torch']}, Python {machine['python']}, commit {str(machine['git_commit'])[:10]}"
        f"{' and changes' if machine['git_dirty'] else ''}. Median of {len(rounds)} rounds; a ratio is the median of "
        f"the rounds' ratios, with their range. Written by `{shlex.join(['python', *sys.argv])}`.",
        "",
        f"| candidate | seconds | {' | '.join(f'× {name}' for name in references)} | waiting for data |",
        f"|---|---|{'---|' * len(references)}---|",
    ]
    for name in rounds[0]:
        seconds = median(figures[name][0] for figures in rounds)
        waits = [figures[name][1] for figures in rounds]
        cells = [ratio([figures[name][0] / figures[other][0] for figures in rounds]) for other in references]
        wait = "–" if waits[0] != waits[0] else f"{median(waits):.1f}%"
        lines.append(f"| {name} | {seconds:.2f} | {' | '.join(cells)} | {wait} |")
    return "\n".join(lines) + "\n"


def ratio(values: list[float]) -> str:
    """The median and the range."""
    return f"{median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    main()
