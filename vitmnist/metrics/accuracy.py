"""Accuracy: the share of images whose label is the most likely class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitmnist.metrics.base import METRICS, BatchMetric

if TYPE_CHECKING:
    from torch import Tensor


@METRICS.register("acc", BatchMetric("%", tag="acc", column="accuracy, %", digits=2))
def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of correct predictions; padding never counts, because its label is no class."""
    return (logits.argmax(dim=1) == labels).sum()
