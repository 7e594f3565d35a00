"""The table of the metrics of an epoch.

A metric of logits and labels, of the confusion matrix or of probabilities has its own module in this folder. A time,
throughput or memory is listed in `TIMES` or `RESOURCE_METRICS`; its value is in the dict that `EpochProgress.compute`
(training/progress.py), `evaluate` (training/loop.py) or `measure_peak_memory` (tracking/environment.py) returns.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vitmnist.errors import ConfigError, suggest_names
from vitmnist.metrics import BatchMetricInfo, MetricInfo, get_metric_infos


@dataclass(frozen=True, kw_only=True)
class EpochMetric(MetricInfo):
    """A metric in the record of an epoch."""

    name: str  # The key in the record
    # A run counts with the value of its selected epoch, or with the median or maximum over its epochs.
    summary: Literal["selected_epoch", "median", "max"] = "median"
    direction: Literal["max", "min"] = "min"

    @property
    def sign(self) -> int:
        """1 if a higher value is better, else -1."""
        return 1 if self.direction == "max" else -1

    @property
    def depends_on_weights(self) -> bool:
        """Whether the metric depends on the weights: the report compares it over seeds, and others over rounds."""
        return self.summary == "selected_epoch"


# TensorBoard sorts the groups of tags by name and opens the first two: `eval` and `train`, with accuracy and loss.
# After them come `train_result` (best epoch, test split), `train_step`, `usage`, `verbose` (other quality), `visuals`.
TIMES = (
    EPOCH_S := EpochMetric(name="epoch_s", unit="s", tag="usage/epoch_s", column="epoch, s"),
    TRAIN_S := EpochMetric(name="train_s", unit="s", tag="usage/train_s", column="training, s"),
    EVAL_S := EpochMetric(name="eval_s", unit="s", tag="usage/eval_s"),
    SAVE_S := EpochMetric(name="save_s", unit="s", tag="usage/save_s", column="saving, s"),
    FIRST_BATCH_S := EpochMetric(name="first_batch_s", unit="s", tag="usage/first_batch_s", column="first batch, s"),
    DATA_WAIT_S := EpochMetric(name="data_wait_s", unit="s", tag="usage/data_wait_s", column="waiting, s"),
    DATA_WAIT_PCT := EpochMetric(
        name="data_wait_pct", unit="%", tag="usage/data_wait_pct", column="waiting, %", digits=1
    ),
    COMPUTE_S := EpochMetric(name="compute_s", unit="s", tag="usage/compute_s"),
    HOST_LEAD_S := EpochMetric(name="host_lead_s", unit="s", tag="usage/host_lead_s"),
)
"""Where the time of an epoch goes."""
LOSS = MetricInfo(unit="", tag="loss", direction="min", is_headline=True)
"""The description of the loss: `config.loss` in training, the cross-entropy in evaluation."""
RESOURCE_METRICS = (
    IMAGES_PER_S := EpochMetric(
        name="images_per_s", unit="images/s", tag="usage/images_per_s", column="images/s", digits=0, direction="max"
    ),
    HOST_PEAK_MIB := EpochMetric(
        name="host_peak_mib", unit="MiB", tag="usage/host_mib", column="host, MiB", digits=0, summary="max"
    ),
    GPU_PEAK_MIB := EpochMetric(
        name="gpu_peak_mib", unit="MiB", tag="usage/gpu_mib", column="GPU, MiB", digits=0, summary="max"
    ),
)
"""Throughput and memory."""


def build_epoch_table(selected: Mapping[str, MetricInfo] | None = None) -> dict[str, EpochMetric]:
    """Return the metrics of an epoch by name, in the order of the report's columns.

    Each call builds the table, because a metric can be registered at any time. `selected` are the metrics that a run
    computes, by default all.

    Raises:
        ValueError: two metrics have the same name, tag or column.
    """
    selected = get_metric_infos() if selected is None else selected
    trained = {name: metric for name, metric in selected.items() if isinstance(metric, BatchMetricInfo)}
    table = [
        *TIMES,
        _epoch_metric("train", "loss", LOSS),
        *(_epoch_metric("train", name, replace(metric, column=None)) for name, metric in trained.items()),
        _epoch_metric("eval", "loss", LOSS),
        *(_epoch_metric("eval", name, metric) for name, metric in selected.items()),
        *RESOURCE_METRICS,
    ]
    for attribute in ("name", "tag", "column"):
        counts = Counter(getattr(metric, attribute) for metric in table)
        if duplicates := ", ".join(sorted(value for value, count in counts.items() if value and count > 1)):
            raise ValueError(f"two metrics have the {attribute} {duplicates}; choose another one in vitmnist/metrics")
    return {metric.name: metric for metric in table}


def _epoch_metric(split: str, name: str, metric: MetricInfo) -> EpochMetric:
    """Return a registered metric, or the loss, as it is recorded for `train` or `eval`."""
    tag = f"{split}/{metric.tag}" if metric.is_headline else f"verbose/{split}_{metric.tag}"
    return EpochMetric(name=f"{split}_{name}", summary="selected_epoch", **vars(metric) | {"tag": tag})


def find_metric(name: str, key: str, selected: Mapping[str, MetricInfo] | None = None) -> EpochMetric:
    """Return the metric called `name` or `eval_NAME`; raises `ConfigError`, with `key` in the message, without one."""
    by_name = build_epoch_table(selected)
    if metric := by_name.get(name) or by_name.get(f"eval_{name}"):
        return metric
    advice = f"is not selected; add it to metrics, or set {key} to another one: " if name in build_epoch_table() else ""
    advice = advice or "is not among the metrics of an epoch; "
    raise ConfigError(f"{key}={name}: {advice}{suggest_names(name, by_name)}")
