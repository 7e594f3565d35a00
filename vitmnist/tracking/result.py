"""`result.json`: what a run did and what came of it, as one object."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vitmnist.runtime.files import write_whole
from vitmnist.training.metrics import PassFigures, StepFigures


@dataclass(frozen=True)
class EpochRecord:
    """The figures of one epoch. Times in seconds, accuracies and shares in percent, memory in MiB.

    `train_s` is `data_wait_s`, `compute_s` and everything else in the training pass but saving; `epoch_s` is `train_s`,
    `eval_s` and `save_s`. None where this machine, or the version that wrote the record, has no such figure. `ended_at`
    is in seconds since 1970, `steps` are what was watched.
    """

    epoch: int
    epoch_s: float
    train_s: float
    eval_s: float
    data_wait_s: float
    compute_s: float
    train_loss: float
    train_acc: float
    eval_loss: float
    eval_acc: float
    images_per_s: float
    host_peak_mib: float | None
    gpu_peak_mib: float | None
    gpu_util_pct: float | None
    ended_at: float
    steps: list[StepFigures]
    save_s: float | None = None

    @property
    def data_wait_pct(self) -> float:
        """The share of the training pass that was spent waiting for data."""
        return 100 * self.data_wait_s / self.train_s

    @classmethod
    def of(
        cls,
        epoch: int,
        train: PassFigures,
        val: PassFigures,
        host_peak_mib: float | None,
        gpu_peak_mib: float | None,
        gpu_util_pct: float | None,
        steps: list[StepFigures],
    ) -> EpochRecord:
        """The record of a training pass and the evaluation after it."""
        save_s = train.save_s + val.save_s
        return cls(
            epoch=epoch,
            epoch_s=train.seconds + val.seconds + save_s,
            train_s=train.seconds,
            eval_s=val.seconds,
            data_wait_s=train.data_wait_s,
            compute_s=train.compute_s,
            train_loss=train.loss,
            train_acc=train.accuracy,
            eval_loss=val.loss,
            eval_acc=val.accuracy,
            images_per_s=train.images / train.seconds,
            host_peak_mib=host_peak_mib,
            gpu_peak_mib=gpu_peak_mib,
            gpu_util_pct=gpu_util_pct,
            ended_at=time.time(),
            steps=steps,
            save_s=save_s,
        )

    @classmethod
    def kept(cls, record: Mapping[str, Any]) -> EpochRecord:
        """The record that `asdict` took apart.

        Raises:
            TypeError: it lacks a field that every version wrote, or has one that this version does not know.
        """
        return cls(**{**record, "steps": [StepFigures(**step) for step in record["steps"]]})


@dataclass(kw_only=True)
class Result:
    """Everything `result.json` says; `status` is completed, failed or interrupted, and failed until it is known."""

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
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    setup_s: float | None = None
    compile_s: float | None = None
    epochs: list[EpochRecord] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None

    def summary(self) -> dict[str, float | None]:
        """The run in seven figures; medians leave the first epoch out when there is more than one."""
        steady = self.epochs[1:] or self.epochs
        return {
            "eval_acc_last": self.epochs[-1].eval_acc if self.epochs else None,
            "eval_acc_best": max((epoch.eval_acc for epoch in self.epochs), default=None),
            "epoch_s_median": median(epoch.epoch_s for epoch in steady) if steady else None,
            "data_wait_pct": median(epoch.data_wait_pct for epoch in steady) if steady else None,
            "images_per_s": median(epoch.images_per_s for epoch in steady) if steady else None,
            "setup_s": self.setup_s,
            "compile_s": self.compile_s,
        }

    def write(self, folder: Path) -> None:
        """Write `result.json` into `folder`, whole or not at all."""
        self.ended_at = time.time()
        content = asdict(self) | {"summary": self.summary()}
        del content["setup_s"], content["compile_s"]
        write_whole(folder / "result.json", json.dumps(content, indent=2, allow_nan=False).encode())
