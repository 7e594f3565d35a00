"""Evaluates a trained model: accuracy, metrics per class, the confusion matrix, and its mistakes.

    vitmnist evaluate outputs/runs/DATE/TIME-…
    vitmnist evaluate outputs/runs/DATE/TIME-… --mistakes mistakes.csv --grid mistakes.png --confusion confusion.png
    vitmnist evaluate outputs/runs/DATE/TIME-… data.dataset.path=other data.dataset.test_share=0 --json

Uses the best weights (best.pt) if there are any, else the final weights. Like training, evaluates the validation split
if there is one, else the test split. --weights and --split select others.
"""

import json
import sys
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch import Tensor

from vitmnist.cli.command import add_run_arguments, create_parser, errors_as_messages
from vitmnist.inference.trained_model import load_model
from vitmnist.metrics import get_metric_infos
from vitmnist.metrics.classification import compute_class_metrics
from vitmnist.runtime.files import encode_csv
from vitmnist.tracking.pictures import draw_confusion, draw_worst_mistakes

# Options of `tabulate` for right-aligned columns; all columns but the first, the class, are numbers.
TABLE_OPTIONS: Any = {"tablefmt": "plain", "disable_numparse": [0], "stralign": "right"}


def describe_evaluation(matrix: Tensor, classes: tuple[str, ...], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Collect the metrics of an evaluation and of each class, for JSON; values that are not finite become None."""
    by_class = compute_class_metrics(matrix, classes).items()
    images = matrix.sum(dim=1).tolist()
    rows = [{"class": name, "images": count, **row} for (name, row), count in zip(by_class, images, strict=True)]
    return {
        "images": int(matrix.sum()),
        **{name: value if isfinite(value) else None for name, value in metrics.items()},
        "classes": rows,
        "confusion_matrix": matrix.tolist(),
    }


def format_metrics(metrics: dict[str, Any]) -> str:
    """Format the values of `describe_evaluation` for a terminal."""
    lines = [f"{metrics['images']:,} images"]
    for name, metric in get_metric_infos().items():
        if name in metrics:
            lines.append(f"{name} {'–' if metrics[name] is None else metric.format(metrics[name])}")
    classes = metrics["classes"]
    counts = [[row["class"], *images] for row, images in zip(classes, metrics["confusion_matrix"], strict=True)]
    lines += ["", "precision, recall and F1 of each class, in %"]
    lines += [tabulate(classes, headers="keys", floatfmt=".2f", missingval="–", **TABLE_OPTIONS)]
    lines += ["", "confusion matrix (rows: true class, columns: predicted class)", tabulate(counts, **TABLE_OPTIONS)]
    return "\n".join(lines)


@errors_as_messages()
def main() -> None:
    parser = create_parser("evaluate", __doc__)
    add_run_arguments(parser, overrides=True, device=True)
    parser.add_argument("--split", help="train, validation or test (default: validation if there is one, else test)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--mistakes", type=Path, metavar="CSV", help="list all misclassified images in this file")
    parser.add_argument("--grid", type=Path, metavar="PNG", help="draw the mistakes with the highest confidence")
    parser.add_argument("--confusion", type=Path, metavar="PNG", help="draw the confusion matrix")
    parser.add_argument("--predictions", action="store_true", help="print JSON with the prediction of each image")
    options = parser.parse_intermixed_args()
    evaluation = load_model(options.run, options.weights, options.device).evaluate(options.split, options.overrides)
    split = evaluation.split
    if options.mistakes:
        # Rows are sorted by confidence, highest first; ties keep the order of the split.
        rows = evaluation.rows(evaluation.predictions.mistakes())
        columns = ("image", "true_class", "predicted_class", "probability")
        options.mistakes.write_bytes(encode_csv(columns, rows).encode(errors="surrogateescape"))
    if options.grid:
        if picture := draw_worst_mistakes(split, evaluation.predictions):
            picture.save(options.grid, "PNG")
        else:
            print(f"{options.grid}: not written, because there are no mistakes", file=sys.stderr)
    if options.confusion:
        draw_confusion(evaluation.confusion_matrix, split.classes).save(options.confusion, "PNG")
    metrics = describe_evaluation(evaluation.confusion_matrix, split.classes, evaluation.metrics)
    if options.json or options.predictions:
        document = {"weights": str(evaluation.weights), "split": evaluation.split_name, **metrics}
        if options.predictions:
            document["predictions"] = evaluation.rows(range(len(split)))
        print(json.dumps(document))
    else:
        print("\n".join([str(evaluation.weights), f"{evaluation.split_name} split", format_metrics(metrics)]))
