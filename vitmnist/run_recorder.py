"""Records, logs and saves each completed epoch."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from vitmnist.checkpoint.manager import CheckpointManager
from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, DataError, classify_error
from vitmnist.metrics.classification import compute_class_metrics
from vitmnist.metrics.epoch_record import EpochRecord, Monitor, check_metrics
from vitmnist.metrics.epoch_table import EPOCH_S, EVAL_S, SAVE_S, TRAIN_S
from vitmnist.runtime.progress_bar import tqdm
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import World
from vitmnist.tracking.environment import measure_peak_memory
from vitmnist.tracking.log import log_early_stop, log_epoch
from vitmnist.tracking.loggers import Logger
from vitmnist.tracking.result import Result
from vitmnist.training.loop import AfterStep, Predictions
from vitmnist.training.progress import EpochProgress


@dataclass(eq=False)
class RunRecorder:
    """Records, logs and saves the epochs of a run. Only rank 0 has loggers."""

    config: Config
    result: Result
    world: World
    monitor: Monitor
    checkpoints: CheckpointManager
    loggers: list[Logger]
    draw_images: Callable[[Predictions, int], Mapping[str, Image]]
    """Draws images for the loggers from the predictions and the index of an epoch."""
    is_first_of_start: bool = True
    """True until the first epoch of this process has ended."""

    def is_done(self) -> bool:
        """Whether all epochs are done, or the last `patience` epochs in a row were no better than the best epoch."""
        epochs = self.result.epochs
        return len(epochs) >= self.config.epochs_to_train or self.monitor.is_exhausted(epochs)

    @contextmanager
    def progress_bar(self, progress: EpochProgress, num_batches: int) -> Iterator[AfterStep]:
        """Show a bar for an epoch and its evaluation; yield a callback that advances it and saves checkpoints."""
        bar = tqdm(
            desc=f"epoch {progress.epoch + 1}",
            total=num_batches,
            initial=progress.accumulator.num_batches,
            unit="batch",
            leave=False,
            mininterval=0.5,
            disable=None if self.world.is_main else True,  # None: show the bar only if stderr is a terminal.
        )

        def after_step(timer: EpochTimer) -> None:
            bar.update()
            self.checkpoints.after_step(progress, timer)

        with bar:
            yield after_step

    def finish_epoch(
        self,
        progress: EpochProgress,
        train_metrics: Mapping[str, Any],
        eval_metrics: Mapping[str, Any],
        predictions: Predictions,
    ) -> None:
        """Record, log and save a completed epoch.

        Raises:
            ConfigError: the monitored metric is not measured on this machine.
            TrainingError: a loss or metric is not finite.
            DataError: the records or the checkpoint cannot be written. If the records cannot, the run is saved first.
            RunInterrupted: the run was asked to stop, and has been saved.
        """
        result = self.result
        record = self._make_record(progress, train_metrics, eval_metrics)
        if self.config.log.per_class:
            classes = self.checkpoints.dataset.train.classes
            record["classes"] = compute_class_metrics(predictions.confusion_matrix(len(classes)), classes)
        if record[self.monitor.metric.name] is None:
            raise ConfigError(f"monitor={self.config.monitor}: is not measured on this machine")
        result.epochs.append(record)
        self.is_first_of_start = False
        is_last = self.is_done()
        # Save the best epoch only with a validation split: selecting it by the test split would bias its accuracy.
        is_best = self.monitor.best_epoch(result.epochs) == len(result.epochs) - 1 and result.eval_split == "validation"
        try:  # Write the records before the checkpoint, because resuming removes records that are newer than it.
            self._write_records(record, predictions, is_last)
        except OSError as error:
            self.checkpoints.after_epoch(is_last, is_best, must_save=True)
            raise DataError(f"cannot write the records: {classify_error(error).message}") from error
        log_epoch(result, self.config.epochs_to_train, self.monitor.metric)
        self.checkpoints.after_epoch(is_last, is_best)

    def finish_training(self) -> None:
        """Record and log whether training stopped early, and write the final weights."""
        self.result.stopped_early = len(self.result.epochs) < self.config.epochs_to_train
        log_early_stop(self.result, self.monitor)
        self.checkpoints.save_final_weights()

    def _make_record(
        self, progress: EpochProgress, train_metrics: Mapping[str, Any], eval_metrics: Mapping[str, Any]
    ) -> EpochRecord:
        """Make the record of an epoch; rank 0 sends its record to all ranks."""
        save_s = train_metrics[SAVE_S.name] + eval_metrics[SAVE_S.name]
        epoch_s = train_metrics[TRAIN_S.name] + eval_metrics[EVAL_S.name] + save_s
        times = {SAVE_S.name: save_s, EPOCH_S.name: epoch_s}
        metrics = {**train_metrics, **eval_metrics, **times, **measure_peak_memory(self.checkpoints.step.device)}
        check_metrics(metrics, f"epoch {progress.epoch + 1}")
        record = {
            "epoch": progress.epoch,
            **metrics,
            "first_of_start": self.is_first_of_start,
            "ended_at": time.time(),
            "steps": progress.logged_steps(),
        }
        # The ranks must agree on the best and the last epoch, and the monitored metric can be a time, which differs.
        return self.world.broadcast_object(lambda: record)

    def _write_records(self, record: EpochRecord, predictions: Predictions, is_last: bool) -> None:
        """Append a row to `epochs.csv`, and send the epoch to the loggers; raises `OSError` if that fails."""
        if not self.world.is_main:
            return
        epoch, interval = record["epoch"], self.config.log.images_every_epochs
        self.result.append_epoch()
        for logger in self.loggers:
            logger.add_epoch(record)
        if self.loggers and interval and (is_last or (epoch + 1) % interval == 0):
            images = self.draw_images(predictions, epoch)
            for logger in self.loggers:
                logger.add_images(images, epoch)
