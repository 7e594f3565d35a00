"""The record of an epoch, the best epoch of a run, and the summary of a metric over its epochs."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vitmnist.errors import TrainingError
from vitmnist.metrics.epoch_table import EpochMetric

log = logging.getLogger(__name__)

EpochRecord = dict[str, Any]
"""An epoch in `result.json`: `epoch` (counted from 0), the value of each time, memory and selected metric (None if this
machine cannot measure it), `first_of_start`, `ended_at` (seconds since 1970), and `steps`, a list of
`{step, loss, lr, grad_norm}`."""


def drop_non_finite(metrics: Mapping[str, float | None], monitored: str, where: str) -> dict[str, float | None]:
    """Replace each metric that is not finite by None, with a warning; `where` begins the messages.

    Raises `TrainingError` if it is a loss, or the monitored metric.
    """
    for name, value in metrics.items():
        if value is not None and not math.isfinite(value):
            is_loss = name in ("train_loss", "eval_loss", "test_loss")
            if is_loss or name in (monitored, monitored.replace("eval_", "test_", 1)):
                advice = "; try a smaller optimizer.lr" if is_loss else ""
                raise TrainingError(f"{where}: {name} is {value}; it must be finite{advice}")
            log.warning("%s: %s is %s, and is left out", where, name, value)
    return {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}


def epochs_since_last_start(epochs: Sequence[EpochRecord]) -> Sequence[EpochRecord]:
    """Return the epochs since the last start; earlier epochs may have used another loader or machine."""
    starts = [index for index, epoch in enumerate(epochs) if epoch.get("first_of_start")]
    return epochs[max(starts, default=0) :]


def summarize(epochs: Sequence[EpochRecord], metric: EpochMetric) -> float | None:
    """Return the median or the maximum over the epochs since the last start; None if the metric was not measured.

    Medians skip the first epoch after a start (cold caches and allocators) if there is another.
    """
    epochs = epochs_since_last_start(epochs)
    if metric.summary == "median":
        epochs = epochs[1:] or epochs
    values = [epoch[metric.name] for epoch in epochs if epoch.get(metric.name) is not None]
    return float(max(values) if metric.summary == "max" else median(values)) if values else None


@dataclass(frozen=True)
class Monitor:
    """The metric that chooses the best epoch; training stops after `patience` epochs in a row without a better one."""

    metric: EpochMetric
    patience: int | None = None

    def history(self, epochs: Sequence[EpochRecord]) -> list[float | None]:
        """Return the value after each epoch, negated if lower is better; None if it was not measured."""
        values = (epoch.get(self.metric.name) for epoch in epochs)
        return [None if value is None else self.metric.sign * value for value in values]

    def best_epoch(self, epochs: Sequence[EpochRecord]) -> int | None:
        """Return the index of the best epoch, the first among equals; None if no epoch has a value."""
        values = {index: value for index, value in enumerate(self.history(epochs)) if value is not None}
        return max(values, key=values.__getitem__, default=None)

    def is_exhausted(self, epochs: Sequence[EpochRecord]) -> bool:
        """Whether training stops after these epochs."""
        best = self.best_epoch(epochs)
        return self.patience is not None and best is not None and len(epochs) - 1 - best >= self.patience
