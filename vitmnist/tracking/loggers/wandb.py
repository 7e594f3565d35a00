"""Logs a run to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitmnist.errors import ConfigError, MissingExtraError, first_line
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.tracking.loggers import LOGGERS, Logger, collect_epoch_scalars, collect_step_scalars
from vitmnist.tracking.result import Result

if TYPE_CHECKING:
    from PIL import Image

ID_FILE = "wandb-id.txt"
"""The file in the folder of a run that has the ID of the run on the server of wandb."""


@dataclass
class WandbOptions:
    """The options of `logger=[{name: wandb, …}]`. wandb itself reads WANDB_MODE, WANDB_ENTITY and other variables."""

    project: str = "vitmnist"


@LOGGERS.register("wandb", WandbOptions)
class Wandb(Logger):
    """Logs the metrics and images of a run under the same tags as TensorBoard, by epoch and step.

    Offline, wandb cannot continue a run: two runs with one ID replace or repeat each other's epochs when they are
    synchronised. Each offline start is therefore a run of its own with all epochs from the first.

    Raises:
        ConfigError: wandb cannot be reached.
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, options: WandbOptions, folder: Path, result: Result) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        self._wandb, path = wandb, folder / ID_FILE
        is_continued = path.exists() and wandb.setup().settings.mode not in ("offline", "dryrun")
        try:
            self._run = wandb.init(
                project=options.project,
                name=folder.name,
                dir=folder,
                id=path.read_text(encoding="ascii").strip() if is_continued else None,
                resume="allow",
                config=result.config,
                # The folder of the run already has its log.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(f"logger: wandb: {first_line(error)}; WANDB_MODE=offline needs no login") from error
        for prefix, axis in (("*", "epoch"), ("step/*", "step/number")):
            self._run.define_metric(prefix, step_metric=axis)
        if not self._run.offline:
            path.write_text(self._run.id, encoding="ascii")
        # The server may have epochs newer than the checkpoint. Retraining repeats them exactly, so skip them.
        self._epochs_sent = int(dict(self._run.summary).get("epoch", 0)) if self._run.resumed else 0
        for record in result.epochs:
            self.add_epoch(record)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._run.finish(exit_code=int(kind is not None))

    def add_epoch(self, record: EpochRecord) -> None:
        if record["epoch"] < self._epochs_sent:
            return
        for values in record["steps"]:
            self._run.log({"step/number": values["step"] + 1, **collect_step_scalars(values)})
        self._run.log({"epoch": record["epoch"] + 1, **collect_epoch_scalars(record)})

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        if epoch >= self._epochs_sent:
            logged = {f"images/{name}": self._wandb.Image(image) for name, image in images.items()}
            self._run.log({"epoch": epoch + 1, **logged})
