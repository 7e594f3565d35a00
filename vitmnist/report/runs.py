"""What a run left behind, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vitmnist.config import resolved
from vitmnist.errors import DataError
from vitmnist.folders import is_claimed

Record = dict[str, Any]
NUMBERS = ("epoch_s", "train_s", "data_wait_s", "compute_s", "images_per_s", "val_acc", "train_loss", "val_loss")


@dataclass(frozen=True)
class Run:
    """A run, as far as it went.

    `status` is completed, failed, interrupted, running, killed (it left no result), not begun or unreadable; `reason`
    says why it did not complete. `result` is what `result.json` holds, empty where there is none. `disturbed` tells
    whether it is known to have been at work beside another one (`vitmnist.report.beside`).
    """

    folder: Path
    status: str
    reason: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    disturbed: bool = False

    @property
    def epochs(self) -> list[Record]:
        """The records of all its epochs."""
        return list(self.result.get("epochs", ()))

    def seconds_to(self, target: float) -> float | None:
        """Seconds of all epochs up to the first that reached an accuracy, in percent, and of compiling before them.

        None if none did.
        """
        seconds = (self.result.get("summary") or {}).get("compile_s") or 0.0
        for epoch in self.epochs:
            seconds += epoch["epoch_s"]
            if epoch["val_acc"] >= target:
                return float(seconds)
        return None

    @property
    def resumed(self) -> bool:
        """Whether its times are of more than one sitting."""
        return (self.folder / "resumed.yaml").exists()


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs among some folders and all below them, each once, in the order of their names and numbers.

    Raises:
        DataError: a folder that is not there, or that holds no run.
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
    """The run of a folder; what cannot be read is a run with that status and reason."""
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
        result = json.loads(file.read_text())
        check(result)
        config = result.get("config") or _hydra_config(folder)
        return Run(folder, str(result["status"]), str(result["error"] or ""), config, result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Run(folder, "unreadable", f"result.json: {error!r}", _hydra_config(folder), {})


def check(result: Record) -> None:
    """Whether the content of a `result.json` is what the report reads of it.

    Raises:
        ValueError, KeyError, TypeError: something is missing, or is of another kind.
    """
    for key in ("config", "choices", "dataset", "distributed", "environment", "trainer"):
        if not isinstance(result.get(key) or {}, dict):
            raise TypeError(f"{key} is no object")
    dataset = result.get("dataset") or {"sha256": {}, "train_size": 0, "test_size": 0}
    if not isinstance(dataset["sha256"], dict) or not isinstance(dataset["train_size"] + dataset["test_size"], int):
        raise TypeError("dataset is not as it should be")
    for epoch in result["epochs"]:
        for key in NUMBERS:
            if not 0 <= epoch[key] < float("inf"):
                raise ValueError(f"{key} is {epoch[key]}")
        if not epoch["train_s"]:
            raise ValueError("train_s is 0")


def _hydra_config(folder: Path) -> dict[str, Any]:
    """The configuration by Hydra's record; empty where there is none."""
    try:
        loaded = OmegaConf.load(folder / ".hydra" / "config.yaml")
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return {}
    return resolved(loaded) if isinstance(loaded, DictConfig) else {}
