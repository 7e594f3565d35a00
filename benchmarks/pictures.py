"""Pictures per second from JPEG files to normalised float32 batches on the CPU, and the seconds to a first batch.

    python benchmarks/pictures.py --output benchmarks/results/pictures-cpu.md

The files, 500×375 and about 50 KB each, are drawn once into `--folder`. All candidates crop, flip and normalise, with 2
workers or threads, except in "Bytes ready for the device", where the rest is the device's work. They decode in every
epoch, or start from the same squares in memory, or replace the DataLoader of a script. FFCV and simplejpeg are left out
if they are not installed: benchmarks/README.md has the commands.
"""

import argparse
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from picture_baselines import (
    BATCH_SIZE,
    HEIGHT,
    QUALITY,
    WIDTH,
    WORKERS,
    Epoch,
    ffcv,
    files,
    per_sample,
    simplejpeg,
    torchvision,
)
from PIL import Image
from rounds import at_least_one, command_line, main, ratios, report, spread, table, take_turns
from torchvision.transforms import v2

from vitmnist import Preprocess, from_dataloader, load_dataset, make_loader
from vitmnist.augment.preprocess import build_augment
from vitmnist.config.compose import compose
from vitmnist.data.datasets.base import Split
from vitmnist.data.images import ColorMode, ImageReader
from vitmnist.runtime.cpu import one_core_per_thread
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.tracking.environment import describe_environment

LEAST_S = 0.5  # shortest turn; epochs of small pictures take milliseconds
TABLES = {
    "First batch, nothing prepared": "s",
    "Bytes ready for the device": "pictures/s",
    "Decoding in each epoch": "pictures/s",
    "Decoded once": "pictures/s",
    "The random transforms of a script": "pictures/s",
}
CROP_AND_FLIP = ["data/augment=compose"]
CROP_AND_FLIP += ["data.augment.operations=[{name: random_resized_crop}, {name: horizontal_flip}]"]


def draw(folder: Path, pictures: int) -> None:
    """Write the files that are missing: smooth pictures with a little texture, in two classes."""
    for number in range(pictures):
        file = folder / str(number % 2) / f"{number}.jpg"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            generator = np.random.default_rng(number)
            cells = generator.integers(0, 256, (HEIGHT // 25, WIDTH // 25, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(cells).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
            pixels = (smooth + generator.integers(-10, 11, (HEIGHT, WIDTH, 1))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(written := file.with_suffix(".part"), "JPEG", quality=QUALITY)
            written.rename(file)  # an interrupted run leaves no partial file


def ours(name: str, train: Split, overrides: list[str], **options: Any) -> Epoch:
    """The batches of a loader as the trainer gives them to the model."""
    loader = make_loader(name, train, batch_size=BATCH_SIZE, device="cpu", seed=0, **options)
    preprocess = Preprocess(train, build_augment(compose(overrides).data.augment))

    def epoch(number: int) -> Iterator[Any]:
        for (images, labels), keys in zip(loader.epoch(number), preprocess.keys(loader.sampler, number), strict=False):
            if preprocess.has_mixing and keys is not None:
                yield preprocess.mix_batch(images, labels, keys)
            else:
                yield preprocess(images, keys), labels

    return epoch


def load(folder: Path, root: Path, side: int) -> Split:
    """Our training split, decoded into `root` unless it is there already."""
    return load_dataset("image_folder", root=str(root), path=str(folder), size=side, mode="rgb").train


def pictures_per_second(epoch: Epoch, numbers: Iterator[int], _round: int) -> float:
    """Speed over one epoch, or over as many as take `LEAST_S`."""
    started, pictures = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < LEAST_S:
        pictures += sum(len(labels) for _, labels in epoch(next(numbers)))
    return pictures / seconds


def first_batch_s(start: Callable[[Path], Epoch], _round: int) -> float:
    """Seconds from an empty folder to the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        next(iter(start(Path(folder))(0)))
        return time.perf_counter() - started


def host_bytes(folder: Path, side: int, train: Split, root: Path) -> dict[str, Epoch]:
    """Candidates that deliver uint8 batches on the host; FFCV and torchvision crop at random where ours resize."""
    epochs = {
        "torchvision, 2 workers": epochs_of(torchvision(folder, side, len(train), normalise=False)),
        **{
            f"`{name}`": make_loader(name, train, batch_size=BATCH_SIZE, device="cpu", seed=0).epoch
            for name in ("disk", "ram")
        },
    }
    if find_spec("ffcv"):
        epochs["FFCV, 2 threads"] = ffcv(folder, root, side, len(train), "jpg", normalise=False)
    return epochs


def decoding(folder: Path, side: int, train: Split, root: Path) -> dict[str, Epoch]:
    """Candidates that decode in each epoch."""
    epochs = {
        "torchvision, 2 workers": epochs_of(torchvision(folder, side, len(train))),
        "`disk`": ours("disk", train, CROP_AND_FLIP),
    }
    if find_spec("ffcv"):
        epochs["FFCV, 2 threads"] = ffcv(folder, root, side, len(train), "jpg")
    if find_spec("simplejpeg"):
        epochs["simplejpeg and Pillow, 2 threads"] = simplejpeg(files(folder).samples[: len(train)], side)
    return epochs


def decoded(folder: Path, side: int, train: Split, root: Path) -> dict[str, Epoch]:
    """Candidates that start from the same squares in memory; FFCV from those in its file."""
    epochs = {
        "torchvision v2 per sample": per_sample(train, side),
        "`ram`": ours("ram", train, CROP_AND_FLIP),
        "torchvision v2 per sample, as `crops`": per_sample(train, side, 0.35, v2.ColorJitter(0.2, 0.2, 0.2)),
        "`ram`, `crops`": ours("ram", train, ["data/augment=crops"]),
        "`ram`, `imagenet`": ours("ram", train, ["data/augment=imagenet"]),
    }
    if find_spec("ffcv"):
        epochs["FFCV, 2 threads"] = ffcv(folder, root, side, len(train), "raw")
    return epochs


def of_a_script(folder: Path, side: int, train: Split, _: Path) -> dict[str, Epoch]:
    """A script's DataLoader, and what replaces it."""
    epochs = {}
    for workers in (WORKERS, 0):
        loader = torchvision(folder, side, len(train), workers)
        epochs[f"DataLoader, {workers} workers"] = epochs_of(loader)
        for form in ("exact", "tensor"):
            name = f'`from_dataloader(…, transforms="{form}")` of it'
            epochs[f"{name}, {workers} workers"] = epochs_of(from_dataloader(loader, "ram", transforms=form))
    return epochs


def epochs_of(loader: Iterable[Any]) -> Epoch:
    """A DataLoader, which begins a new epoch whenever it is iterated over."""
    return lambda _: loader


def cold(folder: Path, side: int, train: Split) -> dict[str, Callable[[Path], Epoch]]:
    """Candidates for the time from files to a first batch, and decoding alone."""

    def decode(threads: int, _: Path) -> Epoch:
        read = ImageReader((side, side), ColorMode.rgb, draft=True)
        return lambda _: [
            deque(
                ordered_map(read, (Path(path) for path, _ in files(folder).samples), threads, 8, one_core_per_thread()),
                0,
            )
        ]

    def ram(root: Path) -> Epoch:
        return ours("ram", load(folder, root, side), CROP_AND_FLIP)

    return {
        "decoding alone, 2 threads": partial(decode, 2),
        "decoding alone, 1 thread": partial(decode, 1),
        "`ram`": ram,
        "`disk`, of a set that is decoded": lambda _: ours("disk", train, CROP_AND_FLIP),
        "torchvision, 2 workers": lambda _: epochs_of(torchvision(folder, side, len(files(folder)))),
    }


def rows(turns: Mapping[str, Callable[[int], float]], side: int, rounds: int, digits: int) -> list[list[str]]:
    """Let the candidates take turns, and return their rows of the table."""
    results = take_turns(turns, rounds)
    first = next(iter(results.values()))
    return [[name, str(side), spread(values, digits), ratios(values, first)] for name, values in results.items()]


def measure(folder: Path, root: Path, side: int, arguments: argparse.Namespace) -> list[list[list[str]]]:
    """Rows of the tables for one size."""
    train = load(folder, root, side).subset(slice(arguments.batches * BATCH_SIZE))
    seconds = {name: partial(first_batch_s, start) for name, start in cold(folder, side, train).items()}
    tables = [rows(seconds, side, arguments.rounds, 2)]
    if find_spec("ffcv"):  # once: its code is compiled for long
        once = first_batch_s(lambda _: ffcv(folder, root, side, len(train), "raw"), 0)
        tables[0].append(["FFCV, its file included", str(side), f"{once:.1f} (once)", ""])
    for candidates in (host_bytes, decoding, decoded, of_a_script):
        epochs = candidates(folder, side, train, root)
        speeds = {name: partial(pictures_per_second, epoch, count()) for name, epoch in epochs.items()}
        tables.append(rows(speeds, side, arguments.rounds, 0))
    return tables


def compare(arguments: argparse.Namespace) -> str:
    """Measure every size and return the report."""
    logging.disable()
    folder = arguments.folder.expanduser() / str(arguments.pictures)
    draw(folder / "train", arguments.pictures)
    draw(folder / "test", 2)
    with tempfile.TemporaryDirectory() as root:
        found = [measure(folder, Path(root), side, arguments) for side in arguments.sides]
    size = sum(file.stat().st_size for file in folder.glob("train/*/*")) / arguments.pictures / 1000
    method = (
        f"{arguments.pictures} JPEG files of {WIDTH}×{HEIGHT} and {size:.0f} KB, read before, so that the system has "
        f"them in memory; {arguments.rounds} rounds: median and range. Speeds are those of epochs of "
        f"{arguments.batches} batches of {BATCH_SIZE}. A ratio is to the first row of the size in the same round. "
        "Until the first batch, torchvision reads the files of a few batches, the others all files."
    )
    parts = []
    for number, (title, unit) in enumerate(TABLES.items()):
        listed = [row for tables in found for row in tables[number]]
        parts += [f"## {title}", table(["candidate", "pixels", unit, "ratio"], listed)]
    return report("Pictures", describe_environment(torch.device("cpu")), method, *parts)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/vitmnist/benchmark-pictures"))
    parser.add_argument("--pictures", type=at_least_one, default=2000)
    parser.add_argument("--batches", type=at_least_one, default=12, help="in an epoch of the speeds")
    parser.add_argument("--sides", type=at_least_one, nargs="+", default=[32, 64, 224], help="pixels")
    main(parser, compare)
