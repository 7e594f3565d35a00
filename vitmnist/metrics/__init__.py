"""The registry of metrics. The modules in this folder register them.

Reports import these modules but not torch, so the modules import torch only for type hints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitmnist.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """How the values of a metric are shown and compared.

    Args:
        unit: s, %, MiB or images/s; empty for a loss or a number without a unit.
        tag: the tag in TensorBoard. A registered metric is shown as `verbose/train_TAG` and `verbose/eval_TAG`.
        direction: whether the highest or the lowest value is the best; `monitor` and `patience` follow it.
        column: the title of the column in the report; None: no column.
        digits: decimal places; None: two for %, otherwise four. The report shows three significant digits of seconds.
        is_headline: show a registered metric as `train/TAG` and `eval/TAG`, and in the log line of an epoch.
    """

    unit: str
    tag: str
    direction: Literal["max", "min"]
    column: str | None = None
    digits: int | None = None
    is_headline: bool = False

    def format(self, value: float) -> str:
        """Format a value with its decimal places, and a percent sign."""
        digits = self.digits if self.digits is not None else 2 if self.unit == "%" else 4
        return f"{value:,.{digits}f}" + ("%" if self.unit == "%" else "")

    @property
    def scale(self) -> int:
        """The factor from the value of a registered function, or its mean, to the recorded value."""
        return 100 if self.unit == "%" else 1


class BatchMetricInfo(MetricInfo):
    """The description of a metric `NAME` of a batch, recorded as `train_NAME` and `eval_NAME`.

    The function takes float32 logits `[B, classes]` and int64 labels `[B]`; labels of padding are negative. It returns
    the sum over the other images as a scalar tensor on the same device, without waiting for the device. The recorded
    value is the mean over the images of the pass; the unit `%` multiplies it by 100.
    """


class ConfusionMetricInfo(MetricInfo):
    """The description of a metric `NAME` of all predictions of an evaluation, recorded as `eval_NAME`.

    The function takes the confusion matrix, float64 `[classes, classes]` on the CPU: the number of images by true class
    (rows) and predicted class (columns). It returns a scalar tensor; the unit `%` multiplies it by 100.
    """


class ProbabilityMetricInfo(MetricInfo):
    """The description of a metric `NAME` of all probabilities of an evaluation, recorded as `eval_NAME`.

    The function takes the softmax probabilities, float32 `[N, classes]`, and the labels, int64 `[N]`, of all images on
    the device of the run. It returns a scalar tensor; the unit `%` multiplies it by 100.
    """


METRICS: Registry[BatchMetricInfo | ConfusionMetricInfo | ProbabilityMetricInfo, Callable[..., Tensor]]
METRICS = Registry("metrics", __package__, kinds=(BatchMetricInfo, ConfusionMetricInfo, ProbabilityMetricInfo))


def get_metrics(kind: type[MetricInfo]) -> dict[str, Callable[..., Tensor]]:
    """Return the functions of the metrics of a kind, by name."""
    members = METRICS.members().items()
    return {name: member.function for name, member in members if isinstance(member.declaration, kind)}


def compute_evaluation_metrics(matrix: Tensor, probabilities: Tensor | None, labels: Tensor) -> dict[str, float]:
    """Compute the metrics of all predictions of an evaluation, by name, in their units.

    The confusion matrix is int64 `[classes, classes]`. The probabilities can be None if no metric needs them.
    """
    arguments = {ConfusionMetricInfo: (matrix.double(),), ProbabilityMetricInfo: (probabilities, labels)}
    return {
        name: float(function(*values)) * METRICS.members()[name].declaration.scale
        for kind, values in arguments.items()
        for name, function in get_metrics(kind).items()
    }
