"""The metrics of an epoch: one table for `result.json`, `epochs.csv`, TensorBoard and the report.

To add a metric, add a row here, and its value to the dict of `EpochProgress.compute` or `evaluate` (both in
`vitmnist/training/loop.py`), or of `RunContext.finish_epoch` (`vitmnist/run.py`); with several ranks, summed over them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from typing import Any, Literal

EpochRecord = dict[str, Any]
"""An epoch in `result.json`: `epoch` (counted from 0), a value for each of `METRICS` (None: this machine cannot measure
it), `first_of_start`, `ended_at` (seconds since 1970), and `steps`, a list of `{step, loss, lr, grad_norm}`."""


@dataclass(frozen=True)
class Metric:
    """A value that is measured in each epoch.

    Args:
        name: the key in an `EpochRecord`.
        unit: s, %, MiB, images/s; empty for a loss.
        tag: where TensorBoard shows it.
        column: the title of its column in the report and in HParams; None for a metric that only the CSV file has.
        digits: after the decimal point in the report; None prints seconds with three significant digits.
        over_epochs: how a run's epochs become one number in the report and in the summary.
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
    Metric("first_batch_s", "s", "time/first_batch_s", "first batch, s"),
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
    Metric("gpu_util_pct", "%", "gpu/util_pct", "GPU busy, %", digits=0, over_epochs="last"),
)


def epoch_record(
    epoch: int, metrics: dict[str, float | None], steps: list[dict[str, Any]], first_of_start: bool
) -> EpochRecord:
    """The record of an epoch that has just ended.

    Args:
        first_of_start: whether it is the first since the run was started or resumed.

    Raises:
        KeyError: a metric of the table was not measured, or one that was is not in the table.
    """
    if differing := metrics.keys() ^ {metric.name for metric in METRICS}:
        raise KeyError(f"measured metrics and METRICS differ: {', '.join(sorted(differing))}")
    return {"epoch": epoch, **metrics, "first_of_start": first_of_start, "ended_at": time.time(), "steps": steps}


def check_records(epochs: Sequence[Any]) -> None:
    """Raise an error of any type unless these are the records of the first epochs of a run."""
    for number, record in enumerate(epochs):
        steps = record["steps"]
        required = [record["epoch"], record["ended_at"], record["eval_acc"], *(step["step"] for step in steps)]
        optional = [record[metric.name] for metric in METRICS]
        optional += [step[name] for step in steps for name in ("loss", "lr", "grad_norm")]
        values = [*required, *(value for value in optional if value is not None)]
        if not all(isinstance(value, int | float) for value in values) or record["epoch"] != number:
            raise ValueError(f"the record of epoch {number + 1} is incomplete")


SUMMARY = {f"{metric.name}_{metric.over_epochs}": metric for metric in METRICS if metric.column}
SUMMARY["eval_acc_best"] = Metric("eval_acc", "%", "", "best accuracy, %", over_epochs="max")
"""The metrics that also describe a run as a whole, by their keys in its summary."""


class RunningSummary:
    """Metrics of a run as `Metric.over_epochs` says, brought up to date in O(log n) for each further epoch.

    Medians are over the steady epochs: all but the first of each start, which warms up caches and allocators. If none
    is steady, they are over all epochs.

    Attributes:
        values: by the keys of `metrics`; without those that no epoch has.
        steady: the number of steady epochs.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.values: dict[str, float] = {}
        self.steady, self._epochs, self._metrics = 0, 0, metrics
        self._halves: dict[str, tuple[list[float], list[float]]] = {}  # heaps: the lower half, negated, and the upper

    def update(self, epochs: Sequence[EpochRecord]) -> None:
        """Add those epochs of the run that are new; `epochs` are all of them, in order."""
        for epoch in epochs[self._epochs :]:
            is_steady = self._epochs > 0 and not epoch.get("first_of_start")
            if is_steady and not self.steady:  # drop the medians over the others
                self.values = {key: value for key, value in self.values.items() if key not in self._halves}
                self._halves.clear()
            self._epochs, self.steady = self._epochs + 1, self.steady + is_steady
            for key, metric in self._metrics.items():
                value = epoch.get(metric.name)
                if value is None:
                    continue
                if metric.over_epochs == "last":
                    self.values[key] = value
                elif metric.over_epochs == "max":
                    self.values[key] = max(value, self.values.get(key, value))
                elif is_steady or not self.steady:
                    self.values[key] = self._median(key, value)

    def _median(self, key: str, value: float) -> float:
        low, high = self._halves.setdefault(key, ([], []))
        heappush(high, -heappushpop(low, -value))
        if len(high) > len(low):
            heappush(low, -heappop(high))
        return -low[0] if len(low) > len(high) else (high[0] - low[0]) / 2
