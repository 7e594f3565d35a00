"""Records each completed epoch of a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError
from vitmnist.metrics.classification import compute_class_metrics
from vitmnist.metrics.epoch_record import EpochRecord, check_metrics
from vitmnist.metrics.epoch_table import EPOCH_S, EVAL_S, SAVE_S, TRAIN_S, EpochMetric
from vitmnist.runtime.world import World
from vitmnist.tracking.environment import measure_peak_memory
from vitmnist.tracking.loggers import Logger
from vitmnist.tracking.result import Result
from vitmnist.training.loop import Predictions
from vitmnist.training.progress import EpochProgress


@dataclass(eq=False)
class RunRecorder:
    """Records the epochs of a run: in its result, in `epochs.csv` and with its loggers. Only rank 0 has loggers."""

    config: Config
    result: Result
    world: World
    device: torch.device
    monitored: EpochMetric
    classes: Sequence[str]
    loggers: list[Logger]
    draw_images: Callable[[Predictions, int], Mapping[str, Image]]
    """Draws images for the loggers from the predictions and the index of an epoch."""
    is_first_of_start: bool = True
    """True until the first epoch of this process has ended."""

    def add_epoch(
        self,
        progress: EpochProgress,
        train_metrics: Mapping[str, Any],
        eval_metrics: Mapping[str, Any],
        predictions: Predictions,
    ) -> None:
        """Add a completed epoch to the result; rank 0 sends its record to all ranks.

        Raises:
            ConfigError: the monitored metric is not measured on this machine.
            TrainingError: a loss or metric is not finite.
        """
        save_s = train_metrics[SAVE_S.name] + eval_metrics[SAVE_S.name]
        epoch_s = train_metrics[TRAIN_S.name] + eval_metrics[EVAL_S.name] + save_s
        times = {SAVE_S.name: save_s, EPOCH_S.name: epoch_s}
        metrics = {**train_metrics, **eval_metrics, **times, **measure_peak_memory(self.device)}
        check_metrics(metrics, f"epoch {progress.epoch + 1}")
        rank_record = {
            "epoch": progress.epoch,
            **metrics,
            "first_of_start": self.is_first_of_start,
            "ended_at": time.time(),
            "steps": progress.logged_steps(),
        }
        # The ranks must agree on the best and the last epoch, and the monitored metric can be a time, which differs.
        record: EpochRecord = self.world.broadcast_object(lambda: rank_record)
        if self.config.log.per_class:
            record["classes"] = compute_class_metrics(predictions.confusion_matrix(len(self.classes)), self.classes)
        if record[self.monitored.name] is None:
            raise ConfigError(f"monitor={self.config.monitor}: is not measured on this machine")
        self.result.epochs.append(record)
        self.is_first_of_start = False

    def write_epoch(self, predictions: Predictions, is_last: bool) -> None:
        """Append the last epoch to `epochs.csv`, and send it to the loggers; raises `OSError` if that fails."""
        if not self.world.is_main:
            return
        record, interval = self.result.epochs[-1], self.config.log.images_every_epochs
        self.result.append_epoch()
        for logger in self.loggers:
            logger.add_epoch(record)
        epoch = record["epoch"]
        if self.loggers and interval and (is_last or (epoch + 1) % interval == 0):
            images = self.draw_images(predictions, epoch)
            for logger in self.loggers:
                logger.add_images(images, epoch)
