"""The table of the metrics of an epoch.

A metric of logits and labels, or of the confusion matrix, is a module of its own in this folder. Any other metric is a
constant here, a row of `epoch_metrics`, and an entry of the dict that `EpochProgress.compute` (training/progress.py),
`evaluate` (training/loop.py) or `EpochRecorder` (epoch_recorder.py) returns.
"""

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, suggest_names
from vitmnist.metrics import METRICS, batch_metrics


@dataclass(frozen=True)
class Metric:
    """A value that is measured in each epoch.

    Args:
        name: the key in the record of an epoch.
        unit: s, %, MiB or images/s; empty for a loss.
        tag: where TensorBoard shows it.
        column: the title of its column in the report; None for a metric that only the CSV file has.
        digits: decimal places in the report; None: seconds with three significant digits.
        direction: whether the highest or the lowest value is the best.
        over_epochs: how a run's epochs become one number in the report.
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


def metric_name(split: str, name: str) -> str:
    """The name in a record of a registered metric, or of the loss: `eval_acc`, `train_loss`."""
    return f"{split}_{name}"


EPOCH_S = Metric("epoch_s", "s", "time/epoch_s", "epoch, s")
TRAIN_S = Metric("train_s", "s", "time/train_s", "training, s")
EVAL_S = Metric("eval_s", "s", "time/eval_s")
SAVE_S = Metric("save_s", "s", "time/save_s", "saving, s")
FIRST_BATCH_S = Metric("first_batch_s", "s", "time/first_batch_s", "first batch, s")
DATA_WAIT_S = Metric("data_wait_s", "s", "time/data_wait_s", "waiting, s")
DATA_WAIT_PCT = Metric("data_wait_pct", "%", "time/data_wait_pct", "waiting, %", digits=1)
COMPUTE_S = Metric("compute_s", "s", "time/compute_s")
HOST_LEAD_S = Metric("host_lead_s", "s", "time/host_lead_s")
TRAIN_LOSS = Metric(metric_name("train", "loss"), "", "train/loss", over_epochs="last")
EVAL_LOSS = Metric(metric_name("eval", "loss"), "", "eval/loss", over_epochs="last")
IMAGES_PER_S = Metric("images_per_s", "images/s", "throughput/images_per_s", "images/s", digits=0, direction="max")
HOST_PEAK_MIB = Metric("host_peak_mib", "MiB", "memory/host_mib", "host, MiB", digits=0, over_epochs="max")
GPU_PEAK_MIB = Metric("gpu_peak_mib", "MiB", "memory/gpu_mib", "GPU, MiB", digits=0, over_epochs="max")


def epoch_metrics() -> dict[str, Metric]:
    """The metrics of an epoch, by name, in the order of the report's columns.

    The table is built in each call, because a metric may be registered at any time.

    Raises:
        ValueError: two have the same name.
    """
    training_metrics = [_metric_of("train", name, column=None) for name in batch_metrics()]
    evaluation_metrics = [_metric_of("eval", name) for name in METRICS.names()]
    times = [EPOCH_S, TRAIN_S, EVAL_S, SAVE_S, FIRST_BATCH_S, DATA_WAIT_S, DATA_WAIT_PCT, COMPUTE_S, HOST_LEAD_S]
    machine_metrics = [IMAGES_PER_S, HOST_PEAK_MIB, GPU_PEAK_MIB]
    table = [*times, TRAIN_LOSS, *training_metrics, EVAL_LOSS, *evaluation_metrics, *machine_metrics]
    by_name = {metric.name: metric for metric in table}
    if duplicates := {metric.name for metric in table if metric is not by_name[metric.name]}:
        raise ValueError(
            f"two metrics are called {', '.join(sorted(duplicates))}; choose another name in vitmnist/metrics"
        )
    return by_name


def _metric_of(split: str, name: str, **changes: Any) -> Metric:
    """The row of a registered metric for a split."""
    description = METRICS.options_of(name)
    fields = vars(description) | {"tag": f"{split}/{description.tag}"} | changes
    return Metric(metric_name(split, name), over_epochs="last", **fields)


def find_metric(name: str, key: str) -> Metric:
    """The metric of an epoch that is called `name` or `eval_NAME`; `key` is where the configuration names it.

    Raises:
        ConfigError: there is none.
    """
    by_name = epoch_metrics()
    if metric := by_name.get(name) or by_name.get(metric_name("eval", name)):
        return metric
    raise ConfigError(f"{key}={name}: not a metric of an epoch; {suggest_names(name, by_name)}")


def search_objective(config: Config | DictConfig) -> Metric:
    """The metric that a search optimises: `sweep.objective`, or else `monitor`; raises like `find_metric`."""
    name = config.sweep.objective
    return find_metric(config.monitor, "monitor") if name is None else find_metric(name, "sweep.objective")
