"""`result.json`: what a run did, and its results."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vitmnist.diagnosis.verdict import verdict
from vitmnist.runtime.files import write_atomic
from vitmnist.tracking.metrics import SUMMARY, EpochRecord, RunningSummary


@dataclass(kw_only=True)
class Result:
    """The content of `result.json`; docs/records.md describes each key.

    `status` is completed, failed or interrupted. It is failed until the run ends.
    """

    status: str = "failed"
    error: str | None = None
    overrides: list[str]
    choices: dict[str, str]
    config: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    batch_size: int | None = None
    seed: int | None = None
    device: str | None = None
    distributed: dict[str, Any] | None = None
    eval_split: str | None = None
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    setup_s: float | None = None
    compile_s: float | None = None
    epochs: list[EpochRecord] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None

    def summary(self) -> dict[str, float | None]:
        """The run as a whole: `SUMMARY` over its epochs, and the seconds before the first; None: not measured."""
        self._summary.update(self.epochs)
        return {
            **{key: self._summary.values.get(key) for key in SUMMARY},
            "setup_s": self.setup_s,
            "compile_s": self.compile_s,
        }

    @cached_property
    def _summary(self) -> RunningSummary:
        return RunningSummary(SUMMARY)

    def verdict(self) -> str | None:
        """What limits training, the loader or the step; None before the end of an epoch."""
        summary, images = self.summary(), (self.dataset or {}).get("train_size")
        train_s, waiting_s = summary["train_s_median"], summary["data_wait_s_median"]
        if not images or not self.batch_size or not train_s or waiting_s is None:
            return None
        batches = -(-images // self.batch_size)
        return verdict(train_s / batches, waiting_s / batches)

    def write(self, folder: Path) -> None:
        """Write `result.json` into `folder` atomically.

        Raises:
            OSError: it cannot be written.
        """
        self.ended_at = time.time()
        content = asdict(self) | {"summary": self.summary(), "verdict": self.verdict()}
        del content["setup_s"], content["compile_s"]
        write_atomic(folder / "result.json", json.dumps(content, indent=2, allow_nan=False).encode())


def choices_of(composed: DictConfig) -> dict[str, str]:
    """The registered name that each config group came down to: `{"model": "vit", "loader": "ram", …}`."""
    places = ("model", "data.dataset", "data.loader", "data.loader.base", "data.augment", "optimizer", "schedule")
    # Not resolved: a configuration that is refused may have broken interpolations, or lack any of these.
    config = OmegaConf.create(OmegaConf.to_container(composed))
    names = {place.removeprefix("data."): OmegaConf.select(config, f"{place}.name") for place in places}
    return {place: str(name) for place, name in names.items() if name is not None}
