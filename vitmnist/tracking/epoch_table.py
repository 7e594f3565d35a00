"""The metrics of an epoch: one table for `result.json`, `epochs.csv`, TensorBoard and the report.

A metric of logits and labels, or of the confusion matrix, is a module in `vitmnist/metrics`. Any other needs a row
here, and a value in the dict of `EpochProgress.compute` or `evaluate` (both in `vitmnist/training/loop.py`), or of
`Trainer.finish_epoch`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal

from omegaconf import DictConfig

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, TrainingError, allowed_names
from vitmnist.metrics import METRICS, ConfusionMetric

EpochRecord = dict[str, Any]
"""An epoch in `result.json`: `epoch` (counted from 0), a value for each of `epoch_metrics()` (None: this machine cannot
measure it), `first_of_start`, `ended_at` (seconds since 1970), and `steps`, a list of `{step, loss, lr, grad_norm}`."""


@dataclass(frozen=True)
class Metric:
    """A value that is measured in each epoch.

    Args:
        name: the key in an `EpochRecord`.
        unit: s, %, MiB, images/s, cores; empty for a loss.
        tag: where TensorBoard shows it.
        column: the title of its column in the report and in HParams; None for a metric that only the CSV file has.
        digits: after the decimal point in the report; None prints seconds with three significant digits.
        direction: whether the highest or the lowest value is the best.
        over_epochs: how a run's epochs become one number in the report and in the summary.
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
        """A value times this is the larger the better."""
        return 1 if self.direction == "max" else -1


@cache
def epoch_metrics() -> dict[str, Metric]:
    """The metrics of an epoch, by name.

    Not built when this module is imported: a package that registers a metric may import it.

    Raises:
        ValueError: two have the same name.
    """
    registered = {name: METRICS.description_of(name) for name in METRICS.names()}
    table = (
        Metric("epoch_s", "s", "time/epoch_s", "epoch, s"),
        Metric("train_s", "s", "time/train_s", "training, s"),
        Metric("eval_s", "s", "time/eval_s"),
        Metric("save_s", "s", "time/save_s", "saving, s"),
        Metric("first_batch_s", "s", "time/first_batch_s", "first batch, s"),
        Metric("data_wait_s", "s", "time/data_wait_s", "waiting, s"),
        Metric("data_wait_pct", "%", "time/data_wait_pct", "waiting, %", digits=1),
        Metric("compute_s", "s", "time/compute_s"),
        Metric("train_loss", "", "train/loss", over_epochs="last"),
        *(
            Metric(f"train_{name}", metric.unit, f"train/{metric.tag}", over_epochs="last", direction=metric.direction)
            for name, metric in registered.items()
            if not isinstance(metric, ConfusionMetric)
        ),
        Metric("eval_loss", "", "eval/loss", over_epochs="last"),
        *(
            Metric(
                *(f"eval_{name}", metric.unit, f"eval/{metric.tag}", metric.column, metric.digits, "last"),
                direction=metric.direction,
            )
            for name, metric in registered.items()
        ),
        Metric("images_per_s", "images/s", "throughput/images_per_s", "images/s", digits=0, direction="max"),
        Metric("host_peak_mib", "MiB", "memory/host_mib", "host, MiB", digits=0, over_epochs="max"),
        Metric("gpu_peak_mib", "MiB", "memory/gpu_mib", "GPU, MiB", digits=0, over_epochs="max"),
        Metric("cores_busy", "cores", "cpu/cores_busy", over_epochs="last", direction="max"),
        Metric("gpu_util_pct", "%", "gpu/util_pct", "GPU busy, %", digits=0, over_epochs="last", direction="max"),
    )
    by_name = {metric.name: metric for metric in table}
    if twice := {metric.name for metric in table if metric is not by_name[metric.name]}:
        raise ValueError(f"two metrics are called {', '.join(sorted(twice))}; choose another name in vitmnist/metrics")
    return by_name


@cache
def summary_metrics() -> dict[str, Metric]:
    """The metrics that also describe a run as a whole, by their keys in its summary."""
    best = Metric("eval_acc", "%", "", "best accuracy, %", over_epochs="max", direction="max")
    shown = {f"{metric.name}_{metric.over_epochs}": metric for metric in epoch_metrics().values() if metric.column}
    return {**shown, "eval_acc_best": best}


def epoch_record(
    epoch: int, metrics: dict[str, float | None], steps: list[dict[str, Any]], first_of_start: bool
) -> EpochRecord:
    """The record of an epoch that has just ended.

    Args:
        first_of_start: whether it is the first since the run was started or resumed.

    Raises:
        KeyError: a metric of the table was not measured, or one that was is not in the table.
        TrainingError: a value that no record may have.
    """
    if differing := metrics.keys() ^ epoch_metrics().keys():
        raise KeyError(f"the measured metrics and the table differ: {', '.join(sorted(differing))}")
    check_numbers(metrics, lambda reason: TrainingError(f"epoch {epoch + 1}: {reason}; try a smaller optimizer.lr"))
    return {"epoch": epoch, **metrics, "first_of_start": first_of_start, "ended_at": time.time(), "steps": steps}


def check_numbers(metrics: Mapping[str, float | None], error: Callable[[str], Exception]) -> None:
    """Raise `error(reason)` unless each metric is a number, finite and not negative, or None."""
    for name, value in metrics.items():
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise error(f"{name} is {value!r}; it must be finite and not negative")


def steady_epochs(epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
    """All epochs but the first of each start, which warms up caches and allocators."""
    return [epoch for index, epoch in enumerate(epochs) if index and not epoch.get("first_of_start")]


def summarize(epochs: Sequence[EpochRecord], metric: Metric) -> float | None:
    """A metric of a run as `Metric.over_epochs` says; None if it was not measured.

    Medians are over the steady epochs. If none is steady, they are over all epochs.
    """
    if metric.over_epochs == "median":
        epochs = steady_epochs(epochs) or epochs
    values = [epoch[metric.name] for epoch in epochs if epoch.get(metric.name) is not None]
    if not values:
        return None
    if metric.over_epochs == "last":
        return float(values[-1])
    return float(max(values) if metric.over_epochs == "max" else median(values))


@dataclass(frozen=True)
class Monitor:
    """What `monitor` and `patience` say.

    Args:
        patience: how many epochs in a row may be no better than the best one; None: any number.
    """

    metric: Metric
    patience: int | None = None

    def best_epoch(self, epochs: Sequence[EpochRecord]) -> int | None:
        """The index of the best epoch, the first among equals; None if no epoch has a value."""
        name, sign = self.metric.name, self.metric.sign
        values = {index: sign * epoch[name] for index, epoch in enumerate(epochs) if epoch.get(name) is not None}
        return max(values, key=values.__getitem__, default=None)

    def is_exhausted(self, epochs: Sequence[EpochRecord]) -> bool:
        """Whether training stops after these epochs."""
        best = self.best_epoch(epochs)
        return self.patience is not None and len(epochs) - 1 - (-1 if best is None else best) >= self.patience


def may_train_longer(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a configuration may end a run at another epoch than the one before."""
    return any(before.get(key) != now.get(key) for key in ("epochs", "patience", "monitor"))


def find_metric(name: str, key: str) -> Metric:
    """The metric of an epoch that is called `name` or `eval_NAME`; `key` is where the configuration names it.

    Raises:
        ConfigError: there is none.
    """
    by_name = epoch_metrics()
    if metric := by_name.get(name) or by_name.get(f"eval_{name}"):
        return metric
    raise ConfigError(f"{key}={name}: not a metric of an epoch; {allowed_names(name, by_name)}")


def search_objective(config: Config | DictConfig) -> Metric:
    """The metric that a search optimises: `sweep.objective`, or else `monitor`; raises like `find_metric`."""
    name = config.sweep.objective
    return find_metric(config.monitor, "monitor") if name is None else find_metric(name, "sweep.objective")
