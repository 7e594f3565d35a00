"""Accuracy, and metrics in which all classes have the same weight."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from vitmnist.metrics import METRICS, BatchMetricInfo, ConfusionMetricInfo

if TYPE_CHECKING:
    from torch import Tensor


@METRICS.register(
    "acc", info=BatchMetricInfo(unit="%", tag="acc", direction="max", column="accuracy, %", is_headline=True)
)
def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the correct predictions; padding never counts, because its label is negative."""
    return (logits.argmax(dim=1) == labels).sum()


@METRICS.register("macro_f1", info=ConfusionMetricInfo(unit="%", tag="macro_f1", direction="max", column="macro F1, %"))
def macro_f1(matrix: Tensor) -> Tensor:
    """Compute the mean F1 of the classes that occur as label or as prediction."""
    labels, predictions = matrix.sum(dim=1), matrix.sum(dim=0)
    occurs = labels + predictions > 0
    return (2 * matrix.diagonal()[occurs] / (labels + predictions)[occurs]).mean()


@METRICS.register(
    "balanced_accuracy",
    info=ConfusionMetricInfo(unit="%", tag="balanced_acc", direction="max", column="balanced accuracy, %"),
)
def balanced_accuracy(matrix: Tensor) -> Tensor:
    """Compute the mean recall of the classes that have images."""
    images = matrix.sum(dim=1)
    return (matrix.diagonal()[images > 0] / images[images > 0]).mean()


def compute_class_metrics(matrix: Tensor, classes: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Compute precision, recall and F1 of each class in percent; None without predictions or images of the class."""
    correct, actual, predicted = matrix.diagonal().double(), matrix.sum(dim=1), matrix.sum(dim=0)
    columns = {"precision": correct / predicted, "recall": correct / actual, "f1": 2 * correct / (actual + predicted)}
    values = {name: [100 * value if isfinite(value) else None for value in columns[name].tolist()] for name in columns}
    return {label: {name: values[name][index] for name in values} for index, label in enumerate(classes)}
