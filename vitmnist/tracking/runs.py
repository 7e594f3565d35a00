"""Finds runs and reads their records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitmnist.config.schema import flatten_keys
from vitmnist.errors import ConfigError, DataError
from vitmnist.metrics.epoch_record import EpochRecord, Monitor, epochs_since_last_start, summarize
from vitmnist.metrics.epoch_table import EPOCH_S, EpochMetric, build_epoch_table, find_metric
from vitmnist.runtime.file_lock import is_locked
from vitmnist.runtime.files import UnreadableError, read_json_or_yaml
from vitmnist.runtime.run_folder import LOCK_NAME
from vitmnist.tracking.result import CONFIG_FILE, Result, RunMetric, list_run_metrics


@dataclass(frozen=True)
class Run:
    """A run and its record.

    Args:
        result: the content of `result.json`. If the file is missing or unreadable, `status` is running, killed, not
            started or unreadable, and the times come from the files in the folder.
        overlapping: another run was active on the same machine at the same time.
    """

    folder: Path
    result: Result
    overlapping: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration by dotted keys such as `data.loader.name`; empty if unknown."""
        return flatten_keys(self.result.config or {})

    @property
    def seed_overrides(self) -> str:
        """The seed, the seed of a hold-out and the fold, as overrides; runs with equal values have the same quality."""
        values = {key: self.config.get(key) for key in ("seed", "data.holdout_seed", "data.fold")}
        if not (self.config.get("data.holdout") or self.config.get("data.folds")):
            del values["data.holdout_seed"]
        return " ".join(f"{key}={value}" for key, value in values.items() if value is not None)

    @property
    def is_timed(self) -> bool:
        """Whether the times of the run can be compared: it completed, alone on its machine, with a steady epoch."""
        epochs = self.result.epochs
        is_steady = len(epochs_since_last_start(epochs)) > 1 and summarize(epochs, EPOCH_S) is not None
        return self.result.status == "completed" and not self.overlapping and is_steady

    def overlaps(self, other: Run) -> bool:
        """Whether another run was active at the same time."""
        began, ended = self.result.began_at, self.result.ended_at or 0.0
        has_started = "not started" not in (self.result.status, other.result.status)
        is_active = began < (other.result.ended_at or 0.0) and other.result.began_at < ended
        return has_started and is_active and self.folder != other.folder

    @property
    def status_text(self) -> str:
        """The status, with the reason for a failure, or remarks on why times or metrics are not compared."""
        if self.result.status != "completed":
            return f"{self.result.status}: {self.result.error}" if self.result.error else self.result.status
        remarks = {
            "resumed": self.result.resumed,
            f"limit_batches={self.config.get('limit_batches')}": bool(self.config.get("limit_batches")),
            "overlapping": self.overlapping,
            "first epoch only": len(epochs_since_last_start(self.result.epochs)) < 2,
            f"monitor={self.config.get('monitor')} is not registered": self.monitored_metric is None,
        }
        return ", ".join(["completed", *(remark for remark, applies in remarks.items() if applies)])

    @cached_property
    def monitored_metric(self) -> EpochMetric | None:
        """The metric that `monitor` names; None if no installed package registers it."""
        with suppress(ConfigError):
            return find_metric(str(self.config.get("monitor", "eval_acc")), "monitor")
        return None

    def value_of(self, name: str) -> float | None:
        """The value of a metric in `build_run_table`; None if it is not recorded."""
        metric = build_run_table()[name]
        if isinstance(metric, RunMetric):
            return metric.read(self.result)
        return self._selected_epoch.get(name) if metric.depends_on_weights else summarize(self.result.epochs, metric)

    @property
    def _selected_epoch(self) -> EpochRecord:
        """The best epoch on the validation split, or else the last one; empty without one or a registered `monitor`."""
        epochs, best = self.result.epochs, None
        if self.result.eval_split == "validation":
            if self.monitored_metric is None:
                return {}
            best = Monitor(self.monitored_metric).best_epoch(epochs)
        return epochs[-1 if best is None else best] if epochs else {}


def build_run_table() -> dict[str, EpochMetric | RunMetric]:
    """Return the metrics of an epoch and those of a run by name, in the order of the report's columns."""
    return {**build_epoch_table(), **{metric.name: metric for metric in list_run_metrics()}}


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Find all runs in or below folders, each once, in the order of job numbers; raises `DataError` without a run."""
    by_path: dict[Path, Path] = {}
    for folder in folders:
        runs = {path.parent for name in ("result.json", ".hydra") for path in folder.rglob(name)}
        if not runs:
            problem = "contains no runs" if folder.is_dir() else "there is no such folder"
            raise DataError(f"{folder}: {problem}; pass a folder such as outputs/sweeps/DATE/TIME")
        for run in sorted(runs, key=_natural_key):
            by_path.setdefault(run.resolve(), run)
    return list(by_path.values())


def _natural_key(path: Path) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """Read the run in a folder; if its `result.json` is damaged, the status is `unreadable`, with the reason."""
    try:
        return Run(folder, Result.from_json(folder / "result.json"))
    except UnreadableError as error:
        result = Result(folder=folder, status="unreadable", error=f"{folder.name}/result.json: {error}")
    except FileNotFoundError:
        lock = folder.resolve() / LOCK_NAME
        status = "running" if is_locked(lock) else "killed" if lock.exists() else "not started"
        result = Result(folder=folder, status=status, error="it left no result.json" if status == "killed" else None)
    with suppress(FileNotFoundError, UnreadableError):
        config = read_json_or_yaml(folder / CONFIG_FILE)
        result.config = config if isinstance(config, dict) else None
    result.began_at, result.ended_at = _active_times(folder)
    return Run(folder, result)


def _active_times(folder: Path) -> tuple[float, float]:
    """Return when a run began and last wrote a file, in seconds since 1970; 0 without a folder."""
    # The configuration is written at each start.
    files = (path for path in (folder / CONFIG_FILE, folder, *folder.glob("*")) if path.exists())
    times = [path.stat().st_mtime for path in files] or [0.0]
    return times[0], max(times)
