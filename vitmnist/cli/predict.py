"""Classifies image files with a trained model.

    vitmnist predict outputs/runs/DATE/TIME-… picture.png folder 'scans/**/*.jpg'
    vitmnist predict outputs/runs/DATE/TIME-… --invert --json scan.png

Images of any size and mode are resized and converted to the model's input. MNIST's digits are light on dark; `--invert`
is for pen on paper. A folder means all images in it and below it; glob patterns can be quoted.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vitmnist.checkpoint.inference import InferenceModel, load_inference_model
from vitmnist.cli.command import create_parser, echo, errors_as_messages
from vitmnist.cli.trained_run import add_run_arguments
from vitmnist.data.image_listing import find_images
from vitmnist.data.images import collect_file_warnings, to_tensor
from vitmnist.errors import DataError
from vitmnist.runtime.device import choose_device

# The number of images in memory at a time.
BATCH_SIZE = 256


def predict(
    trained: InferenceModel, paths: list[Path], device: torch.device, invert: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row per image: the file, the class, its probability, and the probabilities of all classes.

    For a file that cannot be read, the row has an error instead.
    """
    preprocess = trained.build_preprocess().to(device)
    read = trained.build_reader()
    for start in range(0, len(paths), BATCH_SIZE):
        rows: dict[Path, dict[str, Any]] = {}
        images = {}
        for path in paths[start : start + BATCH_SIZE]:
            rows[path] = {"file": str(path)}
            try:
                with collect_file_warnings() as warned:
                    image = to_tensor(read(path))
                if warned:
                    rows[path]["warning"] = warned[path]
                # The reader of a custom dataset can return other shapes.
                if (shape := tuple(image.shape)) != trained.image_shape:
                    raise DataError(f"{path}: is read as {shape}, and the model takes {trained.image_shape}")
                images[path] = 255 - image if invert else image
            except DataError as error:
                rows[path]["error"] = str(error)
        if images:
            with torch.inference_mode():
                logits = trained.model(preprocess(torch.stack(list(images.values())).to(device)))
            for path, row in zip(images, logits.softmax(dim=1).tolist(), strict=True):
                by_class = dict(zip(trained.classes, row, strict=True))
                best = max(by_class, key=by_class.__getitem__)
                rows[path] |= {"class": best, "probability": by_class[best], "all": by_class}
        yield from rows.values()


@errors_as_messages()
def main() -> None:
    parser = create_parser("predict", __doc__)
    add_run_arguments(parser)
    parser.add_argument("images", nargs="+", help="image files, folders of images, glob patterns")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (auto)")
    parser.add_argument("--invert", action="store_true", help="exchange light and dark first")
    options = parser.parse_intermixed_args()
    device = choose_device(options.device)
    trained = load_inference_model(options.run, device, options.weights)
    rows = list(predict(trained, find_images(options.images), device, options.invert))
    if options.json:
        print(json.dumps(rows))
    for row in rows:
        if "warning" in row:
            echo(f"warning: {row['file']}: {row['warning']}", sys.stderr)
        if "class" in row and not options.json:
            echo(f"{row['file']}: {row['class']} ({100 * row['probability']:.1f}%)")
    if unreadable := [row["error"] for row in rows if "error" in row]:
        raise DataError("\nerror: ".join(unreadable))
