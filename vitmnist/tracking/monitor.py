"""The metric that a run monitors or a search optimises: which epoch was the best, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitmnist.errors import ConfigError, allowed_names
from vitmnist.runtime.records import UnreadableError, read_yaml
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


# A search writes these files into the folder of its sweep.
JOURNAL, SEARCH_RESULT = "search.jsonl", "optimization_results.yaml"


def search_objective(config: Any) -> Metric:
    """The metric that a search optimises: `sweep.objective`, or else `monitor`; raises like `find_metric`."""
    name = config.sweep.objective
    return find_metric(config.monitor, "monitor") if name is None else find_metric(name, "sweep.objective")


def search_summary(folder: Path) -> str:
    """The sentence about the best trial in the folder of a search; empty if there is none."""
    with suppress(FileNotFoundError, UnreadableError):
        values = read_yaml(folder / SEARCH_RESULT)
        return str(values.get("summary") or "") if isinstance(values, dict) else ""
    return ""
