"""What a trained model takes pictures for.

    python -m vitmnist.predict outputs/runs/DATE/TIME-… picture.png other.jpg
    python -m vitmnist.predict outputs/runs/DATE/TIME-… --invert --json scan.png

Pictures of any size and mode are resized and converted to what the model was trained on. MNIST's digits are light on
dark; `--invert` is for pen on paper.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

from vitmnist.accelerator import choose_device
from vitmnist.data.datasets import Split
from vitmnist.data.pictures import Mode, read_picture
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import UserError
from vitmnist.trained import WEIGHTS, Trained, load_trained


def predict(trained: Trained, paths: list[Path], device: torch.device, invert: bool = False) -> list[dict[str, Any]]:
    """For each picture its file, class and probability, and the probabilities of all classes.

    Raises:
        DataError: a file is no picture; names it.
    """
    channels, height, width = trained.shape
    pictures = [read_picture(path, (width, height), Mode.grey if channels == 1 else Mode.rgb) for path in paths]
    if invert:
        pictures = [ImageOps.invert(picture) for picture in pictures]
    images = torch.stack([pil_to_tensor(picture) for picture in pictures])
    split = Split(images, torch.zeros(len(images), dtype=torch.int64), trained.mean, trained.std, trained.classes)
    with torch.inference_mode():
        logits = trained.model(Preprocess(split).to(device)(images.to(device)))
        probabilities = F.softmax(logits, dim=1).tolist()
    found = []
    for path, row in zip(paths, probabilities, strict=True):
        label = max(range(len(row)), key=row.__getitem__)
        by_class = dict(zip(trained.classes, row, strict=True))
        found.append({"file": str(path), "class": trained.classes[label], "probability": row[label], "all": by_class})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("pictures", type=Path, nargs="+", help="picture files")
    parser.add_argument("--weights", choices=WEIGHTS, help="the first of them that there is, if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--invert", action="store_true", help="exchange light and dark first")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    try:
        device = choose_device(arguments.device)
        trained = load_trained(arguments.run, device, arguments.weights)
        found = predict(trained, arguments.pictures, device, arguments.invert)
    except UserError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(found))
    else:
        for row in found:
            print(f"{row['file']}: {row['class']} ({100 * row['probability']:.1f}%)")


if __name__ == "__main__":
    main()
