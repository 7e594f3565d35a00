"""How much faster an image folder is decoded on all cores than on one.

    python benchmarks/decoding.py --pictures 200 --width 1600 --height 1200 --rounds 5

Random JPEG pictures of a class are decoded to 224×224, on one thread and on one per core in turns.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from operator import truediv
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from rounds import check_output, describe, publish, ratio, rotated, table

from vitmnist import load_dataset
from vitmnist.data.datasets import image_folder
from vitmnist.runtime.cpu import available_cores
from vitmnist.tracking.environment import describe_environment


def draw(folder: Path, pictures: int, size: tuple[int, int]) -> None:
    """Smooth pictures, which JPEG compresses about as much as photos."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(pictures):
        pixels = generator.integers(0, 256, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")


def decode(folder: Path, threads: int) -> float:
    """Seconds to decode all pictures into a new cache."""
    with tempfile.TemporaryDirectory() as root, patch.object(image_folder, "available_cores", lambda: threads):
        started = time.perf_counter()
        load_dataset("image_folder", root=root, path=str(folder), size=224, mode="rgb")
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--height", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    check_output(parser, options.output)
    logging.disable()
    candidates = [1, max(2, available_cores())]
    times: dict[int, list[float]] = {threads: [] for threads in candidates}
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder) / "class", options.pictures, (options.width, options.height))
        for number in range(options.rounds):
            for threads in rotated(candidates, number):
                times[threads].append(decode(Path(folder), threads))
    rows = [
        (str(threads), f"{options.pictures / min(seconds):.0f}", ratio(list(map(truediv, times[1], seconds))))
        for threads, seconds in times.items()
    ]
    method = f"{options.pictures} JPEG pictures of {options.width}×{options.height}, {options.rounds} rounds in turns."
    environment = describe_environment(torch.device("cpu"))
    header = ("threads", "pictures/s in the fastest round", "times as fast as 1 thread: median and range")
    lines = ["# Decoding an image folder", "", describe(environment, method), "", *table(header, rows)]
    publish("\n".join(lines) + "\n", options.output)


if __name__ == "__main__":
    main()
