"""Finds runs and reads their records. A run without a readable record is listed too, with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitmnist.config.values import flatten
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.records import UnreadableError, read_json, read_yaml
from vitmnist.runtime.run_folder import is_in_use
from vitmnist.tracking.epoch_table import (
    EpochRecord,
    Metric,
    epoch_metrics,
    steady_epochs,
    summarize,
)
from vitmnist.tracking.monitor import Monitor, find_metric

ENDED = ("completed", "failed", "interrupted")  # `status` in result.json has one of these values.
TEST_ACC = "test_acc"  # The section `test` of result.json has this key.


@dataclass(frozen=True)
class Run:
    """A run and its records.

    Args:
        status: completed, failed, interrupted, running, killed (no `result.json`), not started, or unreadable.
        reason: why it did not complete.
        config: the configuration by full keys such as `data.loader.name`; empty if unknown.
        result: the content of `result.json`; empty if there is none.
        overlapping: another run was active on the same machine at the same time.
    """

    folder: Path
    status: str
    reason: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    overlapping: bool = False

    @property
    def epochs(self) -> list[EpochRecord]:
        """The records of all its epochs."""
        epochs: list[EpochRecord] = self.result.get("epochs", [])
        return epochs

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of its `result.json`, such as `environment`; empty if unknown, as for a run that never started."""
        return self.result.get(name) or {}

    @property
    def seeds(self) -> tuple[str, str]:
        """The seed, and the seed of a drawn hold-out (else empty); runs with equal seeds have the same quality."""
        is_drawn = isinstance(self.config.get("data.holdout"), float)
        return str(self.config.get("seed")), str(self.config.get("data.holdout_seed")) if is_drawn else ""

    @property
    def is_resumed(self) -> bool:
        """Whether it was stopped and resumed."""
        return self.result.get("resumed") is True

    @property
    def is_ranked(self) -> bool:
        """Whether its times are compared: it completed, had the machine to itself, and has a steady epoch."""
        return self.status == "completed" and not self.overlapping and bool(steady_epochs(self.epochs))

    @property
    def state(self) -> str:
        """How it ended and why, and why its times are not compared."""
        if self.status != "completed":
            return f"{self.status}: {self.reason}" if self.reason else self.status
        remarks = {
            "resumed": self.is_resumed,
            "overlapping": self.overlapping,
            "first epoch only": not steady_epochs(self.epochs),
        }
        return ", ".join(["completed", *(remark for remark, applies in remarks.items() if applies)])

    def value(self, name: str) -> float | None:
        """A metric of the run, over its epochs as the table of metrics says; None if it was not measured."""
        return summarize(self.epochs, epoch_metrics()[name])

    def quality(self, name: str) -> float | None:
        """A metric after the best epoch if there was a validation split to choose it by, else after the last.

        A name such as `test_acc` is of the test split, evaluated once at the end.
        """
        if name.startswith("test_"):
            return self.section("test").get(name)
        best = None
        if self.result.get("eval_split") == "validation":
            best = Monitor(monitored([self])).best_epoch(self.epochs)
        return summarize(self.epochs if best is None else self.epochs[: best + 1], epoch_metrics()[name])


def monitored(runs: Iterable[Run]) -> Metric:
    """The metric that runs monitor; the accuracy if they monitor several, or one that is unknown here."""
    names = {str(run.config.get("monitor", "eval_acc")) for run in runs if run.config}
    with suppress(ConfigError, ValueError):
        (name,) = names
        return find_metric(name, "monitor")
    return epoch_metrics()["eval_acc"]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs in or below some folders, each once, in the order of their job numbers.

    Raises:
        DataError: a folder does not exist, or contains no runs.
    """
    by_path: dict[Path, Path] = {}
    for folder in folders:
        runs = {path.parent for name in ("result.json", ".hydra") for path in folder.rglob(name)}
        if not runs:
            problem = "contains no runs" if folder.is_dir() else "no such folder"
            raise DataError(f"{folder}: {problem}; name a folder such as outputs/sweeps/DATE/TIME")
        for run in sorted(runs, key=_natural):
            by_path.setdefault(run.resolve(), run)
    return list(by_path.values())


def _natural(path: Path) -> list[int | str]:
    """Sorts job 10 after job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """The run of a folder; with the status `unreadable` and the reason if its `result.json` is damaged."""
    status, reason, result = "not started", "", {}
    config: dict[str, Any] = {}
    try:
        result = read_json(folder / "result.json")
        if not isinstance(result, dict) or result.get("status") not in ENDED or "epochs" not in result:
            raise ValueError("is not the result of a run")
        config = _flat(result.get("config") or {})
        status, reason = result["status"], str(result.get("error") or "")
    except FileNotFoundError:
        if (folder / ".lock").exists():
            status, reason = ("running", "") if is_in_use(folder) else ("killed", "it left no result.json")
    except ValueError as error:
        status, reason, result = "unreadable", f"{folder.name}/result.json: {error}", {}
    return Run(folder, status, reason, config or _hydra_config(folder), result)


def _hydra_config(folder: Path) -> dict[str, Any]:
    """The configuration in Hydra's record, with interpolations as they are written; empty if there is none."""
    with suppress(FileNotFoundError, UnreadableError):
        loaded = read_yaml(folder / ".hydra" / "config.yaml")
        return _flat(loaded) if isinstance(loaded, dict) else {}
    return {}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by full keys, with lists as text."""
    return {key: str(value) if isinstance(value, list) else value for key, value in flatten(config).items()}
