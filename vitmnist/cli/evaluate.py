"""How good a trained model is: accuracy, figures for each class, the confusion matrix, and the mistakes.

    python -m vitmnist.evaluate outputs/runs/DATE/TIME-…
    python -m vitmnist.evaluate outputs/runs/DATE/TIME-… --mistakes mistakes.csv --grid mistakes.png
    python -m vitmnist.evaluate outputs/runs/DATE/TIME-… data/dataset=kmnist --json

The model is evaluated on the split that its training was evaluated on: the test split, or with data.holdout=N the
held-out training images; data.holdout=null then takes the test split.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmnist.checkpoint.inference import WEIGHTS, load_inference_model
from vitmnist.cli.overrides import compose_again
from vitmnist.config.schema import Config
from vitmnist.config.validation import typed
from vitmnist.data.datasets import Dataset, Split, build_dataset
from vitmnist.data.datasets.base import EVAL_FILES
from vitmnist.data.loaders import make_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import DataError, UserError
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.files import write_whole
from vitmnist.training import loop
from vitmnist.training.metrics import Predictions

COLUMNS = ("image", "true_class", "predicted_class", "probability")


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


@dataclass(frozen=True)
class Evaluation:
    """Predictions of a run's model on the split that it was evaluated on in training."""

    weights: Path
    dataset: Dataset
    predictions: Predictions

    @property
    def split(self) -> Split:
        """The test split, or the held-out training images."""
        return self.dataset.test

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """For each image its file (or index), true class, predicted class, and the probability of the latter."""
        predicted, probabilities = self.predictions.labels.tolist(), self.predictions.confidence.tolist()
        actual, classes = self.split.labels.tolist(), self.split.classes
        return [
            {
                "image": self.split.name(index),
                "true_class": classes[actual[index]],
                "predicted_class": classes[predicted[index]],
                "probability": probabilities[index],
            }
            for index in indices
        ]

    def mistakes_csv(self) -> bytes:
        """A row for each misclassified image, the most confident first, in split order among equals."""
        text = io.StringIO()
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in self.rows(self.predictions.mistakes(self.split.labels)):
            # Nine digits tell any two float32 apart.
            table.writerow({**row, "probability": f"{row['probability']:.9g}"})
        return text.getvalue().encode(errors="surrogateescape")

    def grid_png(self) -> bytes | None:
        """The mistakes of highest confidence, captioned; None where there is none."""
        from vitmnist.tracking.images import worst_mistakes  # matplotlib takes most of a second to import

        picture = io.BytesIO()
        figure = worst_mistakes(self.split, self.predictions)
        if figure is None:
            return None
        figure.savefig(picture, format="png", dpi=150)
        return picture.getvalue()


def evaluate(folder: Path, overrides: list[str], weights: str | None) -> Evaluation:
    """Run a run's model over the split that it was evaluated on in training.

    Args:
        overrides: changes of the run's configuration.
        weights: final, best or last; None takes the first of them that there is.

    Raises:
        UserError: the folder, the overrides or the data cannot be used.
    """
    config = typed(Config, compose_again(folder, overrides))
    device = choose_device(config.device)
    inference_model = load_inference_model(folder, device, weights)
    dataset = build_dataset(config.data.dataset, config.data.root)
    if config.data.holdout:
        dataset = dataset.held_out(config.data.holdout)
    if not any(override.startswith("data") for override in overrides):
        _warn_of_other_files(folder, dataset)
    dataset = replace(dataset, test=inference_model.normalising(dataset.test))
    # The same figures with any loader; this one needs no choice.
    with make_loader(
        "ram", dataset.test, batch_size=config.batch_size, device=device, seed=0, shuffle="none"
    ) as loader:
        preprocess = Preprocess(dataset.test).to(device)
        _, predictions = loop.evaluate(inference_model.model, loader, preprocess)
    return Evaluation(inference_model.path, dataset, predictions)


def _warn_of_other_files(folder: Path, dataset: Dataset) -> None:
    """Say so if the folder of pictures has changed, and other pictures are evaluated than in training."""
    recorded = folder / EVAL_FILES
    if not dataset.test.files or not recorded.is_file():
        return
    before, now = set(os.fsdecode(recorded.read_bytes()).splitlines()), set(dataset.test.files)
    if before != now:
        print(
            f"warning: the pictures have changed since training: {len(now - before)} are new in the "
            f"{dataset.eval_split} split, {len(before - now)} are no longer in it; {recorded} lists the original ones",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitmnist.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", help="what to change of its configuration, such as data/dataset=kmnist")
    parser.add_argument("--weights", choices=WEIGHTS, help="the first of them that there is, if not given")
    parser.add_argument("--mistakes", type=Path, metavar="CSV", help="list every misclassified image in this file")
    parser.add_argument("--grid", type=Path, metavar="PNG", help="draw the mistakes of highest confidence there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--predictions", action="store_true", help="with --json: also the prediction for each image")
    arguments = parser.parse_intermixed_args()
    if arguments.predictions and not arguments.json:
        parser.error("--predictions is part of the JSON object; type --json --predictions")
    try:
        found = evaluate(arguments.run, arguments.overrides, arguments.weights)
        written = [
            _write(path, content())
            for path, content in ((arguments.mistakes, found.mistakes_csv), (arguments.grid, found.grid_png))
            if path
        ]
    except UserError as error:
        sys.exit(f"error: {error}")
    classes = found.split.classes
    summary = figures(found.predictions.confusion_matrix(found.split.labels, len(classes)), classes)
    if arguments.json:
        printed = {"weights": str(found.weights), "split": found.dataset.eval_split, **summary}
        if arguments.predictions:
            printed["predictions"] = found.rows(range(len(found.split)))
        print(json.dumps(printed))
    else:
        print("\n".join([str(found.weights), found.dataset.evaluated_on(), report(summary), *written]))


def _write(path: Path, content: bytes | None) -> str:
    """Write a file; what to print about it.

    Raises:
        DataError: it cannot be written.
    """
    if content is None:
        return f"no mistakes: {path} is not written"
    try:
        write_whole(path, content)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return f"written: {path}"


if __name__ == "__main__":
    main()
