"""The metric that chooses the best epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.metrics.epoch_table import Metric


@dataclass(frozen=True)
class Monitor:
    """The metric that chooses the best epoch, and when to stop because none is better.

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
        if self.patience is None:
            return False
        best = self.best_epoch(epochs)
        epochs_since_best = len(epochs) if best is None else len(epochs) - 1 - best
        return epochs_since_best >= self.patience
