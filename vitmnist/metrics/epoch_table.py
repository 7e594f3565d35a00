"""The table of the metrics of an epoch.

A metric of logits and labels, or of the confusion matrix, has its own module in this folder. Any other metric is a row
of `TIMES` or `MACHINE_METRICS`, and an entry of the dict that `EpochProgress.compute` (training/progress.py),
`evaluate` (training/loop.py) or `PeakMemory` (tracking/environment.py) returns.
"""

from dataclasses import dataclass, replace
from typing import Literal

from omegaconf import DictConfig

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, suggest_names
from vitmnist.metrics import METRICS, BatchMetric, get_batch_metrics


@dataclass(frozen=True)
class Metric:
    """A value that is measured in every epoch.

    Args:
        name: the key in the record of an epoch.
        unit: s, %, MiB or images/s; empty for a loss.
        tag: the tag in TensorBoard.
        column: the title of the column in the report; None: no column.
        digits: decimal places in the report; None: seconds with three significant digits.
        direction: whether the highest or the lowest value is the best.
        over_epochs: how the report summarises the epochs of a run.
    """

    name: str
    unit: str
    tag: str
    column: str | None = None
    digits: int | None = None
    over_epochs: Literal["median", "max", "last"] = "median"
    direction: Literal["max", "min"] = "min"

    @property
    def sign(self) -> int:
        """1 if a higher value is better, else -1."""
        return 1 if self.direction == "max" else -1


TIMES = (
    EPOCH_S := Metric("epoch_s", "s", "time/epoch_s", "epoch, s"),
    TRAIN_S := Metric("train_s", "s", "time/train_s", "training, s"),
    EVAL_S := Metric("eval_s", "s", "time/eval_s"),
    SAVE_S := Metric("save_s", "s", "time/save_s", "saving, s"),
    FIRST_BATCH_S := Metric("first_batch_s", "s", "time/first_batch_s", "first batch, s"),
    DATA_WAIT_S := Metric("data_wait_s", "s", "time/data_wait_s", "waiting, s"),
    DATA_WAIT_PCT := Metric("data_wait_pct", "%", "time/data_wait_pct", "waiting, %", digits=1),
    COMPUTE_S := Metric("compute_s", "s", "time/compute_s"),
    HOST_LEAD_S := Metric("host_lead_s", "s", "time/host_lead_s"),
)
"""Where the time of an epoch goes."""
LOSS = BatchMetric("", tag="loss", direction="min")
"""The description of the loss: `config.loss` in training, the cross-entropy in evaluation."""
MACHINE_METRICS = (
    IMAGES_PER_S := Metric(
        "images_per_s", "images/s", "throughput/images_per_s", "images/s", digits=0, direction="max"
    ),
    HOST_PEAK_MIB := Metric("host_peak_mib", "MiB", "memory/host_mib", "host, MiB", digits=0, over_epochs="max"),
    GPU_PEAK_MIB := Metric("gpu_peak_mib", "MiB", "memory/gpu_mib", "GPU, MiB", digits=0, over_epochs="max"),
)
"""Throughput and memory."""


def build_epoch_table() -> dict[str, Metric]:
    """Return the metrics of an epoch by name, in the order of the report's columns.

    Each call builds the table, because a metric can be registered at any time.

    Raises:
        ValueError: two metrics have the same name.
    """
    registered = {name: METRICS.declaration_of(name) for name in METRICS.names()}
    table = [
        *TIMES,
        _row("train", "loss", LOSS),
        *(_row("train", name, replace(registered[name], column=None)) for name in get_batch_metrics()),
        _row("eval", "loss", LOSS),
        *(_row("eval", name, description) for name, description in registered.items()),
        *MACHINE_METRICS,
    ]
    by_name = {metric.name: metric for metric in table}
    if duplicates := {metric.name for metric in table if metric is not by_name[metric.name]}:
        raise ValueError(
            f"two metrics are called {', '.join(sorted(duplicates))}; choose another name in vitmnist/metrics"
        )
    return by_name


def _row(split: str, name: str, description: BatchMetric) -> Metric:
    """Return the row of a registered metric, or of the loss, for a split."""
    fields = vars(description) | {"tag": f"{split}/{description.tag}"}
    return Metric(f"{split}_{name}", over_epochs="last", **fields)


def find_metric(name: str, key: str) -> Metric:
    """Return the metric of an epoch called `name` or `eval_NAME`; the error message begins with `key`.

    Raises:
        ConfigError: the metric does not exist.
    """
    by_name = build_epoch_table()
    if metric := by_name.get(name) or by_name.get(f"eval_{name}"):
        return metric
    raise ConfigError(f"{key}={name}: not a metric of an epoch; {suggest_names(name, by_name)}")


def find_objective(config: Config | DictConfig) -> Metric:
    """Return the metric that a search optimises: `sweep.objective`, by default `monitor`; raises as `find_metric`."""
    name = config.sweep.objective
    return find_metric(config.monitor, "monitor") if name is None else find_metric(name, "sweep.objective")
