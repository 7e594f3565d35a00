"""Metrics of the confusion matrix, against values computed by hand."""

import pytest
import torch

from vitmnist.metrics import confusion_metrics


def test_classes_count_the_same_however_many_images_they_have() -> None:
    matrix = torch.tensor([[90, 10], [5, 5]])
    values = confusion_metrics(matrix)
    assert values["balanced_accuracy"] == pytest.approx(100 * (0.9 + 0.5) / 2)
    assert values["macro_f1"] == pytest.approx(100 * (180 / (100 + 95) + 10 / (10 + 15)) / 2)


def test_classes_that_do_not_occur_are_left_out() -> None:
    matrix = torch.tensor([[3, 1, 0], [0, 0, 0], [0, 0, 0]])  # 1 is predicted without images, 2 does not occur
    values = confusion_metrics(matrix)
    assert values["balanced_accuracy"] == pytest.approx(75)
    assert values["macro_f1"] == pytest.approx(100 * (6 / 7 + 0) / 2)
