"""Measures pictures per second from JPEG files to normalised batches on the CPU, and the time to the first batch.

    python benchmarks/pictures.py --output benchmarks/results/pictures-cpu.md

The files, 500×375 and about 50 KB each, are drawn once into `--folder`. The candidates decode in every epoch, or start
from the same squares in memory, or replace the DataLoader of a script. They crop, flip and normalise with 2 workers or
threads, except in the table "Bytes ready for the device", where the device would do this. FFCV, which is compared in
tables where it delivers bytes, and simplejpeg are left out if they are not installed; see benchmarks/README.md.

    python benchmarks/pictures.py --device cuda --sides 224

With `--device`, our loaders crop, flip and normalise on that device; FFCV does so on the host, and copies the batches.
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
from rounds import (
    create_parser,
    format_ratios,
    format_report,
    format_spread,
    format_table,
    main,
    positive_int,
    take_turns,
)
from torchvision.transforms import v2

from vitmnist import Preprocess, from_dataloader, load_dataset, make_loader
from vitmnist.augment.preprocess import build_augment
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.data.datasets.base import Split
from vitmnist.data.images import ColorMode, ImageReader
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import cores_per_rank, create_decoder_context
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment

CPU = torch.device("cpu")
TABLES = {
    "First batch, nothing prepared": "s",
    "Bytes ready for the device": "ms",
    "Decoding in each epoch": "pictures/s",
    "Decoded once": "pictures/s",
    "The random transforms of a script": "pictures/s",
}
DEVICE_TABLES = {"Normalised batches on the device": "pictures/s"}
CROP_AND_FLIP = ["data/augment=compose"]
CROP_AND_FLIP += ["data.augment.operations=[{name: random_resized_crop}, {name: horizontal_flip}]"]


def draw(folder: Path, pictures: int) -> None:
    """Write the missing files: smooth pictures with a little texture, in two classes."""
    for number in range(pictures):
        file = folder / str(number % 2) / f"{number}.jpg"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            generator = np.random.default_rng(number)
            cells = generator.integers(0, 256, (HEIGHT // 25, WIDTH // 25, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(cells).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
            pixels = (smooth + generator.integers(-10, 11, (HEIGHT, WIDTH, 1))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(written := file.with_suffix(".part"), "JPEG", quality=QUALITY)
            written.rename(file)  # An interrupted run leaves no partial file.


def build_epoch(name: str, train: Split, overrides: list[str], device: torch.device = CPU) -> Epoch:
    """Build epochs of a loader, preprocessed as in the trainer."""
    loader = make_loader(name, train, batch_size=BATCH_SIZE, device=device, seed=0)
    preprocess = Preprocess(train, build_augment(validate(Config, compose(overrides)).data)).to(device)

    def epoch(number: int) -> Iterator[Any]:
        all_keys = preprocess.random_keys(loader.sampler, number)
        for (images, labels), keys in zip(loader.epoch(number), all_keys, strict=False):
            if preprocess.has_mixing and keys is not None:
                yield preprocess.mix_batch(images, labels, keys)
            else:
                yield preprocess(images, keys), labels

    return epoch


def load_split(folder: Path, root: Path, side: int) -> Split:
    """Load the training split, which is decoded into `root` once."""
    return load_dataset("image_folder", root=str(root), path=str(folder), size=side, mode="rgb").train


def measure_speed(epoch: Epoch, numbers: Iterator[int], device: torch.device, turn_s: float, _round: int) -> float:
    """Return the pictures per second over as many epochs as take `turn_s` seconds."""
    started, pictures = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < turn_s:
        pictures += sum(len(labels) for _, labels in epoch(next(numbers)))
        synchronize(device)
    return pictures / seconds


def measure_milliseconds(epoch: Epoch, numbers: Iterator[int], turn_s: float, _round: int) -> float:
    """Return the milliseconds per picture on the host."""
    return 1000 / measure_speed(epoch, numbers, CPU, turn_s, _round)


def time_first_batch(start: Callable[[Path], Epoch], _round: int) -> float:
    """Return the seconds from an empty folder to the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        next(iter(start(Path(folder))(0)))
        return time.perf_counter() - started


def build_host_candidates(folder: Path, side: int, train: Split, root: Path) -> dict[str, Epoch]:
    """Build candidates that deliver uint8 batches on the host. FFCV and torchvision crop at random, ours resize."""
    epochs = {
        "torchvision, 2 workers": repeat_loader(torchvision(folder, side, len(train), normalise=False)),
        **{
            f"`{name}`": make_loader(name, train, batch_size=BATCH_SIZE, device="cpu", seed=0).epoch
            for name in ("disk", "cache", "ram")
        },
    }
    if find_spec("ffcv"):
        epochs["FFCV, its file of JPEGs, 2 threads"] = ffcv(folder, root, side, len(train), "jpg", normalise=False)
        epochs["FFCV, its file of squares, 2 threads"] = ffcv(folder, root, side, len(train), "raw", normalise=False)
    return epochs


def build_decoding_candidates(folder: Path, side: int, train: Split, _: Path) -> dict[str, Epoch]:
    """Build candidates that decode in each epoch."""
    epochs = {
        "torchvision, 2 workers": repeat_loader(torchvision(folder, side, len(train))),
        "`disk`": build_epoch("disk", train, CROP_AND_FLIP),
    }
    if find_spec("simplejpeg"):
        epochs["simplejpeg and Pillow, 2 threads"] = simplejpeg(files(folder).samples[: len(train)], side)
    return epochs


def build_decoded_candidates(_folder: Path, side: int, train: Split, _root: Path) -> dict[str, Epoch]:
    """Build candidates that start from the same squares in memory."""
    return {
        "torchvision v2 per sample": per_sample(train, side),
        "`ram`": build_epoch("ram", train, CROP_AND_FLIP),
        "torchvision v2 per sample, as `crops`": per_sample(train, side, 0.35, v2.ColorJitter(0.2, 0.2, 0.2)),
        "`ram`, `crops`": build_epoch("ram", train, ["data/augment=crops"]),
        "`ram`, `imagenet`": build_epoch("ram", train, ["data/augment=imagenet"]),
    }


def build_script_candidates(folder: Path, side: int, train: Split, _: Path) -> dict[str, Epoch]:
    """Build the DataLoader of a script and its replacements."""
    epochs = {}
    for workers in (WORKERS, 0):
        loader = torchvision(folder, side, len(train), workers)
        epochs[f"DataLoader, {workers} workers"] = repeat_loader(loader)
        for transforms in ("exact", "tensor"):
            name = f'`from_dataloader(…, transforms="{transforms}")` of it, {workers} workers'
            epochs[name] = repeat_loader(from_dataloader(loader, "ram", transforms=transforms))
    return epochs


def build_device_candidates(
    folder: Path, side: int, train: Split, root: Path, device: torch.device
) -> dict[str, Epoch]:
    """Build candidates that augment on the device, and FFCV, which augments on the host with all its cores."""
    threads = cores_per_rank()
    names = {"`gpu_slice`": "gpu_slice", "`ram`": "ram", "`disk`": "disk"}
    epochs = {label: build_epoch(name, train, CROP_AND_FLIP, device) for label, name in names.items()}
    epochs["`gpu_slice`, `imagenet`"] = build_epoch("gpu_slice", train, ["data/augment=imagenet"], device)
    if find_spec("ffcv"):
        for mode in ("raw", "jpg"):
            on_host = ffcv(folder, root, side, len(train), mode, threads=threads)
            epochs[f"FFCV, {threads} threads, {mode}"] = partial(copy_batches, on_host, device)
    return epochs


def copy_batches(epoch: Epoch, device: torch.device, number: int) -> Iterator[Any]:
    """Yield the batches of an epoch with their images on the device."""
    for images, labels in epoch(number):
        yield images.to(device, non_blocking=True), labels


def repeat_loader(loader: Iterable[Any]) -> Epoch:
    """Turn a DataLoader, which has a new epoch in each iteration, into an `Epoch`."""
    return lambda _: loader


def build_cold_candidates(folder: Path, side: int, train: Split) -> dict[str, Callable[[Path], Epoch]]:
    """Build candidates for decoding alone, and for the time from files to a first batch."""

    def decode(threads: int, _: Path) -> Epoch:
        read = ImageReader((side, side), ColorMode.rgb, draft=True)
        return lambda _: [
            deque(
                BackgroundMap(
                    read, (Path(path) for path, _ in files(folder).samples), threads, 8, create_decoder_context()
                ),
                0,
            )
        ]

    def ram(root: Path) -> Epoch:
        return build_epoch("ram", load_split(folder, root, side), CROP_AND_FLIP)

    return {
        "decoding alone, 2 threads": partial(decode, 2),
        "decoding alone, 1 thread": partial(decode, 1),
        "`ram`": ram,
        "`disk`, dataset decoded before": lambda _: build_epoch("disk", train, CROP_AND_FLIP),
        "torchvision, 2 workers": lambda _: repeat_loader(torchvision(folder, side, len(files(folder)))),
    }


def measure_rows(turns: Mapping[str, Callable[[int], float]], side: int, rounds: int, digits: int) -> list[list[str]]:
    """Let the candidates take turns, and return their rows of the table."""
    results = take_turns(turns, rounds)
    first = next(iter(results.values()))
    return [
        [name, str(side), format_spread(values, digits), format_ratios(values, first)]
        for name, values in results.items()
    ]


def measure(folder: Path, root: Path, side: int, arguments: argparse.Namespace) -> list[list[list[str]]]:
    """Measure the rows of all tables for a size."""
    train = load_split(folder, root, side).subset(slice(arguments.batches * BATCH_SIZE))
    if arguments.device:
        device = choose_device(arguments.device)
        table = measure_speeds(build_device_candidates(folder, side, train, root, device), side, arguments, device)
        return [[*table, *([] if find_spec("ffcv") else [["FFCV", str(side), "is not installed", ""]])]]
    seconds = {
        name: partial(time_first_batch, start) for name, start in build_cold_candidates(folder, side, train).items()
    }
    tables = [measure_rows(seconds, side, arguments.rounds, 2)]
    if find_spec("ffcv"):  # Measure FFCV once, because compiling its code takes long.
        once = time_first_batch(lambda _: ffcv(folder, root, side, len(train), "raw"), 0)
        tables[0].append(["FFCV, its file included", str(side), f"{once:.1f} (once)", ""])
    host = build_host_candidates(folder, side, train, root)
    milliseconds = {
        name: partial(measure_milliseconds, epoch, count(), arguments.seconds) for name, epoch in host.items()
    }
    tables.append(measure_rows(milliseconds, side, arguments.rounds, 4))
    for candidates in (build_decoding_candidates, build_decoded_candidates, build_script_candidates):
        tables.append(measure_speeds(candidates(folder, side, train, root), side, arguments, CPU))
    return tables


def measure_speeds(
    epochs: Mapping[str, Epoch], side: int, arguments: argparse.Namespace, device: torch.device
) -> list[list[str]]:
    """Measure the rows of a table of speeds."""
    speeds = {name: partial(measure_speed, epoch, count(), device, arguments.seconds) for name, epoch in epochs.items()}
    return measure_rows(speeds, side, arguments.rounds, 0)


def compare(arguments: argparse.Namespace) -> str:
    """Measure every size and return the report."""
    logging.disable()
    folder = arguments.folder.expanduser() / str(arguments.pictures)
    draw(folder / "train", arguments.pictures)
    draw(folder / "test", 2)
    with tempfile.TemporaryDirectory() as root:
        measured = [measure(folder, Path(root), side, arguments) for side in arguments.sides]
    size = sum(file.stat().st_size for file in folder.glob("train/*/*")) / arguments.pictures / 1000
    method = (
        f"{arguments.pictures} JPEG files of {WIDTH}×{HEIGHT} and {size:.0f} KB, which are in the page cache; "
        f"{arguments.rounds} rounds: median and range. Epochs have {arguments.batches} batches of {BATCH_SIZE}; "
        "milliseconds are per picture. A ratio compares a row with the first row of the same size, in the same round. "
        "Before its first batch, torchvision reads the files of a few batches, and every other candidate all files."
    )
    parts = []
    for number, (title, unit) in enumerate((DEVICE_TABLES if arguments.device else TABLES).items()):
        listed = [row for tables in measured for row in tables[number]]
        parts += [f"## {title}", format_table(["candidate", "pixels", unit, "ratio"], listed)]
    device = choose_device(arguments.device or "cpu")
    return format_report("Pictures", describe_environment(device), method, *parts)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/vitmnist/benchmark-pictures"))
    parser.add_argument("--pictures", type=positive_int, default=2000)
    parser.add_argument("--batches", type=positive_int, default=12, help="batches in an epoch")
    parser.add_argument(
        "--sides", type=positive_int, nargs="+", default=[32, 64, 224], help="sides of a crop in pixels"
    )
    # An epoch of small pictures takes only milliseconds.
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum duration of a candidate's turn in a round")
    parser.add_argument("--device", help="measure only batches that are augmented on this device")
    main(parser, compare)
