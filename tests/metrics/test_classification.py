"""Metrics of the confusion matrix, against values computed by hand."""

import pytest
import torch

from vitmnist.metrics import ConfusionMetricInfo, MetricCollection


@pytest.mark.parametrize(
    ("matrix", "balanced_accuracy", "macro_f1"),
    [
        ([[90, 10], [5, 5]], (0.9 + 0.5) / 2, (180 / (100 + 95) + 10 / (10 + 15)) / 2),
        ([[3, 1, 0], [0, 0, 0], [0, 0, 0]], 0.75, (6 / 7 + 0) / 2),  # Class 1 is only predicted, class 2 is absent.
    ],
)
def test_all_classes_that_occur_have_the_same_weight(matrix: list, balanced_accuracy: float, macro_f1: float) -> None:
    expected = {"balanced_accuracy": balanced_accuracy, "macro_f1": macro_f1}
    functions = MetricCollection().of_kind(ConfusionMetricInfo)
    assert {name: float(functions[name](torch.tensor(matrix).double())) for name in expected} == pytest.approx(expected)
