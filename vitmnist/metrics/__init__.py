"""The metrics of a batch: every module in this folder registers one, a function of (logits, labels).

A metric `NAME` is recorded as `train_NAME` and `eval_NAME`. The report, which starts without torch, imports this folder
too: a module imports torch for its type hints only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vitmnist.registry import import_members

if TYPE_CHECKING:
    from torch import Tensor

Compute = TypeVar("Compute", bound="Callable[[Tensor, Tensor], Tensor]")


@dataclass(frozen=True)
class BatchMetric:
    """A registered metric; see `batch_metric`."""

    unit: str
    tag: str
    column: str | None
    digits: int | None
    compute: Callable[[Tensor, Tensor], Tensor]


BATCH_METRICS: dict[str, BatchMetric] = {}
"""The metrics by name."""


def batch_metric(
    name: str, *, unit: str, tag: str, column: str | None = None, digits: int | None = None
) -> Callable[[Compute], Compute]:
    """Function decorator: register a metric.

    The function takes logits, float32 `[B, classes]`, and labels, int64 `[B]`, which are negative for images that are
    padding. It returns the sum over the other images, a tensor without dimensions, on the same device and without
    waiting for it. Recorded is the mean over the images of the pass.

    Args:
        unit: % multiplies the mean by 100.
        tag: TensorBoard shows `train/TAG` and `eval/TAG`.
        column: the title of the evaluation's column in the report and in HParams; None has no column.
        digits: after the decimal point in the report.
    """
    if name in (*BATCH_METRICS, "loss", "s"):
        raise ValueError(f"metric {name!r}: train_{name} is taken; choose another name")

    def register(compute: Compute) -> Compute:
        BATCH_METRICS[name] = BatchMetric(unit, tag, column, digits, compute)
        return compute

    return register


def batch_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Every metric of a batch, summed over its images."""
    return {name: metric.compute(logits, labels) for name, metric in BATCH_METRICS.items()}


import_members(__name__)
