"""Reads what runs left in their folders. What cannot be read is a run too, with the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vitmnist.config.labels import resolved
from vitmnist.errors import DataError
from vitmnist.runtime.files import is_claimed

Record = dict[str, Any]
SECTIONS = ("auto", "choices", "config", "dataset", "distributed", "environment", "summary", "trainer")
# Of an epoch; null or missing where the machine or the version that ran it has no such figure.
NUMBERS = (
    *("epoch_s", "train_s"),
    *(
        "eval_s",
        "save_s",
        "data_wait_s",
        "compute_s",
        "images_per_s",
        "train_loss",
        "train_acc",
        "eval_loss",
        "eval_acc",
    ),
    *("host_peak_mib", "gpu_peak_mib", "gpu_util_pct", "ended_at"),
)
ROUNDING = 1 + 1e-6  # a part may exceed the whole by so much


@dataclass(frozen=True)
class Run:
    """A run, as far as it went.

    `status` is completed, failed, interrupted, running, killed (it left no result), not begun or unreadable; `reason`
    says why it did not complete. `result` is the content of `result.json`, empty where there is none. `overlapping` is
    set if another run ran on the same machine at the same time (`vitmnist.report.overlapping`).
    """

    folder: Path
    status: str
    reason: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    overlapping: bool = False

    @property
    def epochs(self) -> list[Record]:
        """The records of all its epochs."""
        return list(self.result.get("epochs", ()))

    @property
    def environment(self) -> Mapping[str, Any]:
        """Machine and software; empty where they are not known."""
        return self.result.get("environment") or {}

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.config.get("seed"))

    @property
    def resumed(self) -> bool:
        """Whether it was stopped and resumed."""
        return (self.folder / "resumed.yaml").exists()

    @cached_property
    def steady(self) -> list[Record]:
        """The epochs that are compared: without the first one after each known start, which warms up."""
        began = self.result.get("began_at") if self.resumed else None
        resumed = next((n for n, epoch in enumerate(self.epochs) if began and (epoch.get("ended_at") or 0) > began), 0)
        return [epoch for number, epoch in enumerate(self.epochs) if number not in (0, resumed)]

    @property
    def is_ranked(self) -> bool:
        """Whether its times are compared: it completed, had the machine to itself, and has a steady epoch."""
        measured = any(epoch.get("epoch_s") is not None for epoch in self.steady)
        return self.status == "completed" and not self.overlapping and measured

    def figure(self, key: str) -> float | None:
        """The median of a figure over the steady epochs, or over all where none is steady."""
        values = [_figure(epoch, key) for epoch in self.steady or self.epochs]
        known = [value for value in values if value is not None]
        return float(median(known)) if known else None

    def seconds_to(self, target: float) -> float | None:
        """Seconds of all epochs up to the first that reached an accuracy, in percent, and of compiling before them.

        None if none did.
        """
        seconds = (self.result.get("summary") or {}).get("compile_s") or 0.0
        for epoch in self.epochs:
            if epoch.get("epoch_s") is None:
                return None
            seconds += epoch["epoch_s"]
            if (epoch.get("eval_acc") or 0.0) >= target:
                return float(seconds)
        return None


def _figure(epoch: Record, key: str) -> float | None:
    if key == "data_wait_pct":
        wait, train = epoch.get("data_wait_s"), epoch.get("train_s")
        return None if wait is None or train is None else 100 * wait / train
    value: float | None = epoch.get(key)
    return value


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs among some folders and all below them, each once, in the order of their names and numbers.

    Raises:
        DataError: a folder that does not exist, or that holds no run.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: there is no such folder; name one such as outputs/sweeps/DATE/TIME")
        places = {path.parent for name in ("result.json", ".hydra") for path in folder.rglob(name)}
        if not places:
            raise DataError(f"{folder}: holds no run; name one such as outputs/sweeps/DATE/TIME")
        for place in sorted(places, key=_natural):
            found.setdefault(place.resolve(), place)
    return list(found.values())


def _natural(folder: Path) -> tuple[str, int, str]:
    number, _, rest = folder.name.partition("-")
    return str(folder.parent), int(number) if number.isdecimal() else -1, rest


def read_run(folder: Path) -> Run:
    """The run of a folder; one whose records cannot be read has the status `unreadable` and the reason."""
    file = folder / "result.json"
    if not file.exists():
        if not (folder / ".lock").exists():
            status, reason = "not begun", ""
        elif is_claimed(folder):
            status, reason = "running", ""
        else:
            status, reason = "killed", "it left no result.json"
        return Run(folder, status, reason, _hydra_config(folder), {})
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        check(result)
    except (OSError, ValueError, RecursionError) as error:
        return Run(folder, "unreadable", f"{folder.name}/result.json: {error}", _hydra_config(folder), {})
    config = result.get("config") or _hydra_config(folder)
    return Run(folder, result["status"], result.get("error") or "", config, result)


def check(result: Any) -> None:
    """Check the content of a `result.json`: its form, and figures that contradict each other.

    Raises:
        ValueError: says what is wrong, and where.
    """
    if not isinstance(result, dict):
        raise ValueError("is not an object")
    json.dumps(result, ensure_ascii=False).encode()  # what cannot be written again, such as half a surrogate pair
    if result.get("status") not in ("completed", "failed", "interrupted"):
        raise ValueError("status is missing or unknown")
    if not isinstance(result.get("error") or "", str):
        raise ValueError("error is not a string")
    for key in SECTIONS:
        if not isinstance(result.get(key) or {}, dict):
            raise ValueError(f"{key} is not an object")
    dataset, summary = result.get("dataset") or {}, result.get("summary") or {}
    for node, keys in ((result, ("began_at", "ended_at")), (summary, ("compile_s",)), (dataset, ("test_size",))):
        for key in keys:
            _check_number(node, key)
    sums = dataset.get("sha256") or {}
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise ValueError("dataset.sha256 is not an object of strings")
    epochs = result.get("epochs")
    if not isinstance(epochs, list) or not all(isinstance(epoch, dict) for epoch in epochs):
        raise ValueError("epochs is not a list of objects")
    for number, epoch in enumerate(epochs, 1):
        _check_epoch(epoch, f"epoch {number}: ")


def _check_epoch(epoch: Record, where: str) -> None:
    for key in NUMBERS:
        _check_number(epoch, key, where)
        if key in ("epoch_s", "train_s") and epoch.get(key) == 0:
            raise ValueError(f"{where}{key} is 0")
    for part, whole in (("data_wait_s", "train_s"), ("compute_s", "train_s"), ("train_s", "epoch_s")):
        small, large = epoch.get(part), epoch.get(whole)
        if small is not None and large is not None and small > large * ROUNDING:
            raise ValueError(f"{where}{part} is {small:.4g}, above {whole}, which is {large:.4g}")


def _check_number(node: Record, key: str, where: str = "") -> None:
    """A number from 0 on, or nothing."""
    value = node.get(key)
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 <= value <= 1e15 and math.isfinite(value)):
        raise ValueError(f"{where}{key} is {str(value)[:40]}")


def _hydra_config(folder: Path) -> dict[str, Any]:
    """The configuration by Hydra's record; empty where there is none."""
    try:
        loaded = OmegaConf.load(folder / ".hydra" / "config.yaml")
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return {}
    return resolved(loaded) if isinstance(loaded, DictConfig) else {}
