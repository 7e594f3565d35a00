"""Logs a run to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmnist.errors import ConfigError, MissingExtraError, first_line
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.tracking.loggers import LOGGERS, Logger, get_epoch_scalars, get_run_scalars, get_step_scalars
from vitmnist.tracking.result import Result

if TYPE_CHECKING:
    from PIL import Image


@dataclass
class WandbOptions:
    """The options of `logger=[{name: wandb, …}]`. wandb itself reads WANDB_MODE, WANDB_ENTITY and other variables."""

    project: str = "vitmnist"


@LOGGERS.register("wandb", WandbOptions)
class Wandb(Logger):
    """Logs the metrics and images of a run under the same tags as TensorBoard, by epoch and step.

    Each start is a wandb run with all epochs from the first. Continuing a wandb run is not possible offline, where two
    runs with one ID replace or repeat each other's epochs when they are synchronised.

    Raises:
        ConfigError: wandb cannot be reached.
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, options: WandbOptions, folder: Path, result: Result) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        self._wandb, self._result, config = wandb, result, result.config or {}
        try:
            self._run = wandb.init(
                project=options.project,
                name=config.get("name") or folder.name,
                tags=config.get("tags"),
                notes=config.get("notes"),
                dir=folder,
                config=config,
                # The folder of the run already has its log.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(f"logger: wandb: {first_line(error)}; WANDB_MODE=offline needs no login") from error
        for prefix, axis in (("*", "epoch"), ("train_step/*", "train_step/number")):
            self._run.define_metric(prefix, step_metric=axis)
        for record in result.epochs:
            self.add_steps(record["steps"])
            self.add_epoch(record)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if scalars := get_run_scalars(self._result):
            self._log({"epoch": len(self._result.epochs), **scalars})
        self._run.finish(exit_code=int(kind is not None))

    def add_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for values in steps:
            self._log({"train_step/number": values["step"] + 1, **get_step_scalars(values)})

    def add_epoch(self, record: EpochRecord) -> None:
        self._log({"epoch": record["epoch"] + 1, **get_epoch_scalars(record, self._result)})

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        logged = {f"visuals/{name}": self._wandb.Image(image) for name, image in images.items()}
        self._log({"epoch": epoch + 1, **logged})

    def _log(self, values: dict[str, object]) -> None:
        try:
            self._run.log(values)
        except self._wandb.Error as error:
            raise OSError(f"wandb: {first_line(error)}") from error
