"""Measures the speed of random transforms with `from_dataloader`, the original `DataLoader`, `data/augment` and SPDL.

    python benchmarks/transforms.py --output benchmarks/results/transforms-cpu.md

torchvision crops JPEG files of 500×375 to 224×224, flips, converts and normalises them, in batches of 64; in other
cases also with `Resize(256)` before the crop, or with `ColorJitter` after it. A turn is an epoch. A ratio divides the
speed of a loader by the speed of the DataLoader in the same round. SPDL applies the same transforms in threads;
it is left out if it is not installed (`pip install -e '.[bench]'`).
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pictures import draw
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
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from vitmnist import Preprocess, from_dataloader, load_dataset, make_loader
from vitmnist.augment.preprocess import build_augment
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.tracking.environment import describe_environment

BATCH_SIZE = 64
CROP: list[Any] = [T.RandomResizedCrop(224), T.RandomHorizontalFlip()]
NORMALISE: list[Any] = [T.ToTensor(), T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
CASES: dict[str, list[Any]] = {
    "crop": [*CROP, *NORMALISE],
    "Resize(256), crop": [T.Resize(256), *CROP, *NORMALISE],
    "crop, ColorJitter": [*CROP, T.ColorJitter(0.2, 0.2, 0.2), *NORMALISE],
}
ORIGINAL = "DataLoader"
AUGMENT = [
    "data/augment=compose",
    "data.augment.operations=[{name: random_resized_crop}, {name: horizontal_flip}]",
    "data.crop_size=224",
]


def spdl(dataset: ImageFolder, threads: int) -> Iterator[Any]:
    """Yield an epoch of an SPDL pipeline, whose threads read and transform samples."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(torch.randperm(len(dataset)).tolist())
    builder = builder.pipe(dataset.__getitem__, concurrency=threads).aggregate(BATCH_SIZE).pipe(default_collate)
    pipeline = builder.add_sink(3).build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline


def trainer(folder: Path) -> Callable[[], Iterator[Any]]:
    """Build epochs as in the trainer: pictures are stored as 256×256 pixels, and cropped and flipped in batches."""
    root = str(folder.parent / "cache")
    train = load_dataset("image_folder", root=root, path=str(folder), size=256, mode="rgb", test_share=0.1).train
    preprocess = Preprocess(train, build_augment(validate(Config, compose(AUGMENT)).data))
    loader = make_loader("ram", train, batch_size=BATCH_SIZE, device="cpu", seed=0)

    def epoch() -> Iterator[Any]:
        keys = preprocess.random_keys(loader.sampler, 0)
        return ((preprocess(images, key), labels) for (images, labels), key in zip(loader.epoch(0), keys, strict=True))

    return epoch


def measure_speed(epoch: Callable[[], Any], number: int) -> float:
    """Return the pictures per second of an epoch, including the start of workers."""
    started = time.perf_counter()
    pictures = sum(len(labels) for _, labels in epoch())
    return pictures / (time.perf_counter() - started)


def measure(folder: Path, transforms: list[Any], workers: int, rounds: int) -> list[list[str]]:
    """Measure the rows of the table for a list of transforms and a number of workers."""
    dataset = ImageFolder(str(folder), T.Compose(transforms))
    loader: DataLoader[Any] = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers)
    epochs: dict[str, Callable[[], Any]] = {ORIGINAL: partial(iter, loader)}
    costs = {}
    for mode in ("exact", "tensor"):
        started = time.perf_counter()
        replacement: Any = from_dataloader(loader, "ram", transforms=mode)
        nbytes = sum(block.nbytes for block in replacement.dataset.encoded_samples.blocks)
        costs[mode] = time.perf_counter() - started, nbytes
        epochs[mode] = partial(iter, replacement)
    if find_spec("spdl") and workers:
        epochs[f"SPDL, {workers} threads"] = partial(spdl, dataset, workers)
    if transforms == CASES["crop"] and not workers:
        epochs["`data/augment` on `ram`"] = trainer(folder)
    speeds = take_turns({name: partial(measure_speed, epoch) for name, epoch in epochs.items()}, rounds)
    rows = []
    for name, values in speeds.items():
        row = [name, format_spread(values, 0), format_ratios(values, speeds[ORIGINAL])]
        if name in costs:
            set_up, nbytes = costs[name]
            saved_s = len(dataset) * (1 / median(speeds[ORIGINAL]) - 1 / median(values))  # In each epoch
            row += [f"{nbytes / 2**20:,.0f}", f"{set_up:.1f}", f"{set_up / saved_s:.1f}" if saved_s > 0 else "never"]
        rows.append(row)
    return rows


def compare(arguments: argparse.Namespace) -> str:
    """Measure every case and return the report."""
    logging.disable()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pictures"
        folder.mkdir()
        draw(folder, arguments.pictures)
        for case in arguments.cases:
            for workers in arguments.workers:
                rows_of_case = measure(folder, CASES[case], workers, arguments.rounds)
                rows += [[case, str(workers), *row] for row in rows_of_case]
    header = ["transforms", "workers", "loader", "pictures/s", "ratio", "MiB stored", "set-up, s", "break-even, epochs"]
    method = (
        f"{arguments.pictures} JPEG pictures of 500×375, batches of {BATCH_SIZE}, {arguments.rounds} rounds: median "
        "and range. The set-up decodes once and compares the first batches."
    )
    return format_report(
        "Random transforms", describe_environment(torch.device("cpu")), method, format_table(header, rows)
    )


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--pictures", type=positive_int, default=4000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    main(parser, compare)
