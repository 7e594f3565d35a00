"""Classifies image files with a trained model.

    vitmnist predict outputs/runs/DATE/TIME-… picture.png folder 'scans/**/*.jpg'
    vitmnist predict outputs/runs/DATE/TIME-… --invert --json scan.png
    vitmnist predict outputs/runs/DATE/TIME-… --csv folder > predictions.csv

Images of any size and mode are resized and converted to the model's input. The digits of MNIST are light on dark; use
--invert for pen on paper. Folders are searched recursively. Quoted glob patterns are expanded too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vitmnist.cli.command import add_run_arguments, create_parser, errors_as_messages
from vitmnist.data.image_listing import find_images
from vitmnist.errors import DataError
from vitmnist.inference.trained_model import BATCH_SIZE, TrainedModel, load_model
from vitmnist.runtime.files import encode_csv


def predict(model: TrainedModel, paths: list[Path], invert: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row for each file: the class, its probability and the probabilities of all classes, or an error."""
    for start in range(0, len(paths), BATCH_SIZE):
        rows: dict[Path, dict[str, Any]] = {}
        images = {}
        for path in paths[start : start + BATCH_SIZE]:
            rows[path] = {"file": str(path)}
            try:
                image = model.read(path)
                images[path] = 255 - image if invert else image
            except DataError as error:
                rows[path]["error"] = str(error)
        predictions = model.classify(torch.stack([*images.values()])) if images else []
        for path, prediction in zip(images, predictions, strict=True):
            label, probability, probabilities = prediction.label, prediction.probability, prediction.probabilities
            rows[path] |= {"class": label, "probability": probability, "all": probabilities}
        yield from rows.values()


@errors_as_messages()
def main() -> None:
    parser = create_parser("predict", __doc__)
    add_run_arguments(parser, device=True)
    parser.add_argument("images", nargs="+", help="image files, folders of images, glob patterns")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    formats.add_argument("--csv", action="store_true", help="print a CSV table, with the probability of each class")
    parser.add_argument("--invert", action="store_true", help="swap light and dark before classification")
    options = parser.parse_intermixed_args()
    model = load_model(options.run, options.weights, options.device)
    rows = list(predict(model, find_images(options.images), options.invert))
    if options.json:
        print(json.dumps(rows))
    if options.csv:
        columns = ["file", "class", "probability", *(f"probability_{name}" for name in model.classes)]
        for row in rows:
            row |= {f"probability_{name}": value for name, value in row.get("all", {}).items()}
        print(encode_csv(columns, rows), end="")
    for row in rows:
        if "class" in row and not (options.json or options.csv):
            print(f"{row['file']}: {row['class']} ({100 * row['probability']:.1f}%)")
    if unreadable := [row["error"] for row in rows if "error" in row]:
        raise DataError("\nerror: ".join(unreadable))
