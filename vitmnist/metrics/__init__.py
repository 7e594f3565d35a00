"""The registry of metrics, and the metrics that a run selects. The modules in this folder register them.

Reports import these modules but not torch, so the modules import torch only for type hints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from vitmnist.errors import ConfigError, as_data_error
from vitmnist.registry import ConfigGroup

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

    def __post_init__(self) -> None:
        if self.direction not in ("max", "min"):
            raise ValueError(f"direction={self.direction!r}: must be 'max' or 'min'")

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


METRICS: ConfigGroup[object, ..., Tensor]
METRICS = ConfigGroup("metrics", __package__, info_types=(BatchMetricInfo, ConfusionMetricInfo, ProbabilityMetricInfo))
"""Functions of the arguments that their `info` describes, with the options as keywords."""


def get_metric_infos() -> dict[str, MetricInfo]:
    """Return the descriptions of all registered metrics, by name."""
    return {name: member.info for name, member in METRICS.members().items()}


class MetricCollection:
    """The metrics that a run computes.

    Args:
        selection: metrics as in `config.metrics`, by name or as mappings of `name` and options; None: all metrics.

    Raises:
        ConfigError: a metric is unknown, is selected twice, or does not have these options.
    """

    def __init__(self, selection: Sequence[Any] | None = None) -> None:
        self.functions: dict[str, Callable[..., Tensor]] = {}
        self.configs: list[dict[str, Any]] = []  # The name and all options of each metric
        for index, value in enumerate([*METRICS.members()] if selection is None else selection):
            config = {"name": value} if isinstance(value, str) else value
            function, options = METRICS.resolve(config, f"metrics.{index}", complete=True)
            if config["name"] in self.functions:
                raise ConfigError(f"metrics: {config['name']} is selected twice, and has one value in a record")
            self.functions[config["name"]] = partial(function, **vars(options))
            self.configs.append({"name": config["name"], **vars(options)})
        self.configs.sort(key=itemgetter("name"))  # The order of the selection does not matter.
        self.infos = {name: METRICS.members()[name].info for name in self.functions}

    def of_kind(self, kind: type[MetricInfo]) -> dict[str, Callable[..., Tensor]]:
        """Return the functions of the metrics of a kind, by name."""
        return {name: compute for name, compute in self.functions.items() if isinstance(self.infos[name], kind)}

    def compute(self, matrix: Tensor, probabilities: Tensor | None, labels: Tensor) -> dict[str, float]:
        """Compute the metrics of all predictions of an evaluation, by name, in their units.

        The confusion matrix is int64 `[classes, classes]`. The probabilities can be None if no metric needs them.
        """
        values: dict[str, float] = {}
        arguments = {ConfusionMetricInfo: (matrix.double(),), ProbabilityMetricInfo: (probabilities, labels)}
        for kind, tensors in arguments.items():
            for name, compute in self.of_kind(kind).items():
                with as_data_error(f"metrics: {name}"):
                    values[name] = float(compute(*tensors)) * self.infos[name].scale
        return values
