"""The monitored metric of a run: which epoch was the best, and when to stop because none is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitmnist.errors import ConfigError, allowed_names
from vitmnist.tracking.epoch_table import EpochRecord, Metric, epoch_metrics


@dataclass(frozen=True)
class Monitor:
    """What `monitor` and `patience` say.

    Args:
        patience: how many epochs in a row may be no better than the best one; None: any number.
    """

    metric: Metric
    patience: int | None = None

    def best_epoch(self, epochs: Sequence[EpochRecord]) -> int | None:
        """The index of the best epoch, the first among equals; None if no epoch has a number."""
        best, sign = None, 1 if self.metric.direction == "max" else -1
        for index, epoch in enumerate(epochs):
            value = epoch.get(self.metric.name)
            if value is not None and not math.isnan(value) and (best is None or sign * value > best[1]):
                best = index, sign * value
        return best[0] if best else None

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
