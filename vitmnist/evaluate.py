"""How good a trained model is: accuracy, figures for each class, and the confusion matrix.

python -m vitmnist.evaluate outputs/runs/DATE/TIME-…
python -m vitmnist.evaluate outputs/runs/DATE/TIME-… data/dataset=kmnist --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist import engine
from vitmnist.accelerator import choose_device
from vitmnist.config import Config, Shuffle, typed
from vitmnist.data.datasets import build_dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import UserError
from vitmnist.resume import compose_again
from vitmnist.trained import WEIGHTS, load_trained


def figures(matrix: Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy, and precision, recall and F1 of each class, in percent; None where there is nothing to divide by."""
    right, actual, predicted = matrix.diagonal(), matrix.sum(dim=1), matrix.sum(dim=0)

    def percent(part: float, whole: float) -> float | None:
        return 100 * part / whole if whole else None

    return {
        "images": int(matrix.sum()),
        "accuracy": percent(int(right.sum()), int(matrix.sum())),
        "classes": [
            {
                "class": name,
                "images": int(actual[label]),
                "precision": percent(int(right[label]), int(predicted[label])),
                "recall": percent(int(right[label]), int(actual[label])),
                "f1": percent(2 * int(right[label]), int(actual[label] + predicted[label])),
            }
            for label, name in enumerate(classes)
        ],
        "confusion_matrix": matrix.tolist(),
    }


def report(found: dict[str, Any]) -> str:
    """The figures for people."""
    width = max(5, *(len(row["class"]) for row in found["classes"]))
    lines = [f"accuracy {found['accuracy']:.2f}% of {found['images']:,} images", ""]
    lines.append(f"{'class':{width}}  images  precision  recall      F1")
    for row in found["classes"]:
        shares = ("      –" if row[key] is None else f"{row[key]:6.2f}%" for key in ("precision", "recall", "f1"))
        lines.append(f"{row['class']:{width}}  {row['images']:6}    " + " ".join(shares))
    lines += ["", "confusion matrix: a row for each class, a column for what it was taken for"]
    cell = max(len(str(count)) for row in found["confusion_matrix"] for count in row)
    for row, counts in zip(found["classes"], found["confusion_matrix"], strict=True):
        lines.append(f"{row['class']:{width}}  " + " ".join(f"{count:{cell}}" for count in counts))
    return "\n".join(lines)


def evaluate(folder: Path, overrides: list[str], weights: str | None) -> tuple[Path, dict[str, Any]]:
    """The weights that were taken, and the figures of a run's model on the test split.

    Raises:
        UserError: the folder, the overrides or the data cannot be used.
    """
    config = typed(Config, compose_again(folder, overrides))
    device = choose_device(config.device)
    trained = load_trained(folder, device, weights)
    split = trained.normalising(build_dataset(config.data.dataset, config.data.root).test)
    order = EpochOrder(len(split), config.batch_size, config.seed, Shuffle.none)
    # The same figures with any loader; this one needs no choice.
    with LOADERS.build({"name": "ram"}, split, order, device) as loader:
        preprocess = Preprocess(split).to(device)
        _, predictions = engine.evaluate(trained.model, loader, preprocess, device)
    matrix = predictions.confusion_matrix(split.labels, len(split.classes))
    return trained.path, figures(matrix, split.classes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", help="what to change of its configuration, such as data/dataset=kmnist")
    parser.add_argument("--weights", choices=WEIGHTS, help="the first of them that there is, if not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args()
    try:
        path, found = evaluate(arguments.run, arguments.overrides, arguments.weights)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"weights": str(path), **found}) if arguments.json else f"{path}\n{report(found)}")


if __name__ == "__main__":
    main()
