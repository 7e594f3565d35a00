"""The metrics of an epoch: one table for `result.json`, TensorBoard and the report.

To add a metric, add a row here, and put its value into the dict that `train_epoch`, `evaluate` or `run` returns for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

EpochRecord = dict[str, Any]
"""An epoch in `result.json`: `epoch` (counted from 0), a value for each of `METRICS` (None: this machine cannot measure
it), `ended_at` (seconds since 1970), and `steps`, a list of `{step, loss, lr, grad_norm}`."""


@dataclass(frozen=True)
class Metric:
    """A value that is measured in each epoch.

    Args:
        name: the key in an `EpochRecord`.
        unit: s, %, MiB, images/s; empty for a loss.
        tag: where TensorBoard shows it.
        column: the title of its column in the report; None for a metric that only the CSV file has.
        digits: after the decimal point in the report; None prints seconds with three significant digits.
        over_epochs: how a run's epochs become one number in the report.
    """

    name: str
    unit: str
    tag: str
    column: str | None = None
    digits: int | None = None
    over_epochs: Literal["median", "max", "last"] = "median"


METRICS = (
    Metric("epoch_s", "s", "time/epoch_s", "epoch, s"),
    Metric("train_s", "s", "time/train_s", "training, s"),
    Metric("eval_s", "s", "time/eval_s"),
    Metric("save_s", "s", "time/save_s", "saving, s"),
    Metric("data_wait_s", "s", "time/data_wait_s", "waiting, s"),
    Metric("data_wait_pct", "%", "time/data_wait_pct", "waiting, %", digits=1),
    Metric("compute_s", "s", "time/compute_s"),
    Metric("train_loss", "", "train/loss", over_epochs="last"),
    Metric("train_acc", "%", "train/acc", over_epochs="last"),
    Metric("eval_loss", "", "eval/loss", over_epochs="last"),
    Metric("eval_acc", "%", "eval/acc", "accuracy, %", digits=2, over_epochs="last"),
    Metric("images_per_s", "images/s", "throughput/images_per_s", "images/s", digits=0),
    Metric("host_peak_mib", "MiB", "memory/host_mib", "host, MiB", digits=0, over_epochs="max"),
    Metric("gpu_peak_mib", "MiB", "memory/gpu_mib", "GPU, MiB", digits=0, over_epochs="max"),
    Metric("gpu_util_pct", "%", "gpu/util_pct", "GPU busy, %", digits=0),
)
