"""How much faster an image folder is decoded on all cores than on one.

    python benchmarks/decoding.py --pictures 200 --width 1600 --height 1200 --rounds 5

Random JPEG pictures of two classes are decoded to 224×224, on one thread and on one per core in turns.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from rounds import command_line, main, ratios, report, table, take_turns

from vitmnist import load_dataset
from vitmnist.data.datasets import image_folder
from vitmnist.runtime.cpu import available_cores
from vitmnist.tracking.environment import describe_environment


def draw(folder: Path, pictures: int, size: tuple[int, int]) -> None:
    """Smooth pictures, which JPEG compresses about as much as photos."""
    for name in ("0", "1"):
        (folder / name).mkdir()
    generator = np.random.default_rng(0)
    for number in range(pictures):
        pixels = generator.integers(0, 256, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / str(number % 2) / f"{number}.jpg")


def decode(folder: Path, threads: int, number: int) -> float:
    """Seconds to decode all pictures into a new cache, the same work in every round."""
    with tempfile.TemporaryDirectory() as root, patch.object(image_folder, "available_cores", lambda: threads):
        started = time.perf_counter()
        load_dataset("image_folder", root=root, path=str(folder), size=224, mode="rgb")
        return time.perf_counter() - started


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds; the report."""
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder, arguments.pictures, (arguments.width, arguments.height))
        candidates = {threads: partial(decode, folder, threads) for threads in (1, max(2, available_cores()))}
        times = take_turns(candidates, arguments.rounds)
    rows = [
        [str(threads), f"{arguments.pictures / min(seconds):.0f}", ratios(times[1], seconds)]
        for threads, seconds in times.items()
    ]
    return report(
        "Decoding an image folder",
        describe_environment(torch.device("cpu")),
        f"{arguments.pictures} JPEG pictures of {arguments.width}×{arguments.height}, {arguments.rounds} rounds.",
        table(["threads", "pictures/s in the fastest round", "times as fast as 1 thread: median and range"], rows),
    )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--height", type=int, default=1200)
    main(parser, compare)
