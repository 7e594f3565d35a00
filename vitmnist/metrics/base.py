"""The registry of the metrics of a batch: every module in this folder registers one, a function of (logits, labels).

The report, which starts without torch, imports this folder too: a module imports torch for its type hints only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitmnist.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BatchMetric:
    """How a metric `NAME` of a batch is shown; it is recorded as `train_NAME` and `eval_NAME`.

    The function takes logits, float32 `[B, classes]`, and labels, int64 `[B]`, which are negative for images that are
    padding. It returns the sum over the other images, a tensor without dimensions, on the same device and without
    waiting for it. Recorded is the mean over the images of the pass.

    Args:
        unit: % multiplies the mean by 100.
        tag: TensorBoard shows `train/TAG` and `eval/TAG`.
        column: the title of the evaluation's column in the report and in HParams; None has no column.
        digits: after the decimal point in the report.
    """

    unit: str
    tag: str
    column: str | None = None
    digits: int | None = None


METRICS: Registry[Tensor] = Registry("metrics", __package__)


def batch_metrics() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The function of each metric of a batch, by name."""
    return {name: METRICS.function_of(name) for name in METRICS.names()}
