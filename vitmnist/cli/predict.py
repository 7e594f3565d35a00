"""Classifies pictures with a trained model.

    python -m vitmnist.predict outputs/runs/DATE/TIME-… picture.png folder 'scans/**/*.jpg'
    python -m vitmnist.predict outputs/runs/DATE/TIME-… --invert --json scan.png

Pictures of any size and mode are resized and converted to what the model was trained on. MNIST's digits are light on
dark; `--invert` is for pen on paper. Of a folder, and the folders in it, all pictures are taken; a glob pattern may be
quoted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

from vitmnist.checkpoint.inference import WEIGHTS, InferenceModel, load_inference_model
from vitmnist.data.image_io import Mode, find_pictures, printable, read_picture
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import UserError
from vitmnist.runtime.device import choose_device

BATCH_SIZE = 256  # pictures in memory at a time


def predict(
    inference_model: InferenceModel, paths: list[Path], device: torch.device, invert: bool = False
) -> Iterator[dict[str, Any]]:
    """For each picture its file, class and probability, and the probabilities of all classes; a batch at a time.

    Raises:
        DataError: a file is no picture; names it.
    """
    preprocess = Preprocess(mean=inference_model.mean, std=inference_model.std).to(device)
    for start in range(0, len(paths), BATCH_SIZE):
        batch = paths[start : start + BATCH_SIZE]
        images = _read(inference_model, batch, invert).to(device)
        with torch.inference_mode():
            probabilities = F.softmax(inference_model.model(preprocess(images)), dim=1).tolist()
        for path, row in zip(batch, probabilities, strict=True):
            label = max(range(len(row)), key=row.__getitem__)
            by_class = dict(zip(inference_model.classes, row, strict=True))
            yield {
                "file": str(path),
                "class": inference_model.classes[label],
                "probability": row[label],
                "all": by_class,
            }


def _read(inference_model: InferenceModel, paths: list[Path], invert: bool) -> torch.Tensor:
    """The pictures as the model takes them: uint8 `[B, C, H, W]`."""
    channels, height, width = inference_model.shape
    pictures = [read_picture(path, (width, height), Mode.grey if channels == 1 else Mode.rgb) for path in paths]
    if invert:
        pictures = [ImageOps.invert(picture) for picture in pictures]
    return torch.stack([pil_to_tensor(picture) for picture in pictures])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("pictures", nargs="+", help="picture files, folders of pictures, glob patterns")
    parser.add_argument("--weights", choices=WEIGHTS, help="the first of them that there is, if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--invert", action="store_true", help="exchange light and dark first")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    try:
        device = choose_device(arguments.device)
        inference_model = load_inference_model(arguments.run, device, arguments.weights)
        found = list(predict(inference_model, find_pictures(arguments.pictures), device, arguments.invert))
    except UserError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(found))
    else:
        for row in found:
            print(f"{printable(row['file'])}: {row['class']} ({100 * row['probability']:.1f}%)")


if __name__ == "__main__":
    main()
