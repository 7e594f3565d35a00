"""A search: the metric that it optimises, and the files that it leaves in the folder of its sweep."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from vitmnist.runtime.records import UnreadableError, read_yaml
from vitmnist.tracking.epoch_table import Metric
from vitmnist.tracking.monitor import find_metric

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
