"""Records a run: fills in its `Result`, and writes it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from vitmnist.checkpoint import storage
from vitmnist.config.schema import Config, to_json_values
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError, DataError, PeerError, classify_error
from vitmnist.loaders.auto import LoaderSelection
from vitmnist.loaders.base import Loader
from vitmnist.metrics.classification import compute_class_metrics
from vitmnist.metrics.epoch_record import EpochRecord, Monitor, drop_non_finite
from vitmnist.metrics.epoch_table import EPOCH_S, EVAL_S, SAVE_S, TRAIN_S
from vitmnist.runtime.signals import StopSignal, create_interruption
from vitmnist.runtime.world import World
from vitmnist.tracking.environment import describe_environment, measure_peak_memory, reset_peak_memory
from vitmnist.tracking.log import log_early_stop, log_epoch, log_setup, log_test
from vitmnist.tracking.loggers import LOGGERS, Logger, parse_loggers
from vitmnist.tracking.result import Result
from vitmnist.training.loop import EvalPass
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep

log = logging.getLogger(__name__)

DrawImages = Callable[[int], Mapping[str, Image]]
"""Draws images for the loggers from the predictions of an epoch; takes the index of the epoch."""


class RunRecorder:
    """Fills in the result of a run; rank 0 writes `result.json`, `epochs.csv` and the log, and sends it to the loggers.

    `Trainer` calls the methods in the order of their definition, and checkpoints within an epoch call `send_steps` too.

    Args:
        overrides: the command-line overrides, for the record only.
        monitor: chooses the best epoch.

    Raises:
        ConfigError: a logger is unknown.
    """

    def __init__(
        self, config: Config, folder: Path, overrides: list[str], monitor: Monitor, device: torch.device, world: World
    ) -> None:
        self.config, self.folder, self.monitor, self.device, self.world = config, folder, monitor, device, world
        self.result = Result(
            folder=folder,
            overrides=overrides,
            config=to_json_values(config),
            device=str(device),
            distributed={"ranks": world.size} if world.size > 1 else None,
        )
        self._logger_configs = parse_loggers(config.logger)
        self._loggers: list[Logger] = []
        """The open loggers, on rank 0 only. `_logger_stack` closes them."""
        self._logger_stack = ExitStack()
        self._num_sent_steps = 0
        """The number of logged steps of the current epoch that the loggers have."""
        self._has_begun = False
        self._is_first_of_start = True
        """True until the first epoch of this process has ended."""

    @contextmanager
    def record_outcome(self, stop: StopSignal) -> Iterator[None]:
        """Close the loggers at the end of the block, and write to `result.json` how it ended."""
        try:
            with self._logger_stack:
                yield
        except BaseException as raised:
            error = self.world.find_first_failure(raised)
            if stop.reason and classify_error(error).cause == "worker":
                # The signal that stops the run has also stopped its workers.
                error = create_interruption(stop.reason)
            self._record_failure(error)
            if error is raised:
                raise
            raise error from raised
        self.world.disconnect()
        self.result.status = "completed"
        if self.world.is_main:
            self.result.write()

    def _record_failure(self, error: BaseException) -> None:
        """Record why a run did not complete, unless it was refused before training."""
        result, failure = self.result, classify_error(error)
        if failure.status == "interrupted" and self._has_begun:
            self.world.disconnect()
        is_refused = isinstance(error, ConfigError | DataError | PeerError)
        if not self._has_begun and (is_refused or self.config.resume):
            return
        result.status, result.error, result.exit_code = failure.status, failure.message, failure.exit_code
        try:
            if self.world.is_main:
                result.write()
        except OSError as write_error:
            # Only log this error: it must not hide the error that ended the run.
            log.warning("cannot write the records: %s", classify_error(write_error).message)

    def continue_from(self, epochs: list[EpochRecord]) -> None:
        """Continue the record of a resumed run after the epochs of its checkpoint."""
        self.result.epochs[:], self.result.resumed = epochs, True

    def record_selection(self, selection: LoaderSelection) -> None:
        """Record and log which loader `auto` selected."""
        self.result.auto = asdict(selection)
        log.info("expected time per loader\n%s", selection.format_table())

    def record_setup(self, dataset: Dataset, step: TrainStep, train_loader: Loader) -> None:
        """Record and log the dataset, the selected loader, the options of the step and the environment."""
        result, world = self.result, self.world
        result.loader = dict(train_loader.resolved_options)
        result.eval_split = dataset.eval_split_name
        result.trainer = asdict(step.runner.options)
        result.compile_s = step.runner.compile_s or None
        result.dataset = {
            "name": dataset.name,
            **{f"{name}_size": len(split) for name, split in dataset.splits.items()},
            "skipped": dataset.skipped,
            "sha256": world.broadcast_object(lambda: dataset.sha256),
            "division": dataset.division,
        }
        result.environment = describe_environment(self.device) if world.is_main else None
        log_setup(self.config, result, dataset, step, train_loader, world)

    def begin(self) -> None:
        """Open the loggers, and remove records newer than the checkpoint. From here on, a failure is recorded."""
        reset_peak_memory(self.device)  # The peak excludes the set-up.
        result = self.result
        if self.world.is_main:
            loggers = (LOGGERS.build(config, self.folder, result) for config in self._logger_configs)
            self._loggers = [self._logger_stack.enter_context(logger) for logger in loggers]
            result.write_config()
            result.write_epochs()  # Drop rows newer than the checkpoint.
            # A process that is killed while it writes leaves a temporary file.
            for pattern in ("result.json", f"{storage.FOLDER}/final.safetensors", "**/.*.tmp"):
                for path in self.folder.glob(pattern):
                    path.unlink()
        result.setup_s = time.time() - result.began_at - (result.compile_s or 0.0)
        self._has_begun = True

    def add_epoch(
        self, progress: EpochProgress, train_metrics: Mapping[str, Any], eval_pass: EvalPass, classes: Sequence[str]
    ) -> None:
        """Add a completed epoch to the result; rank 0 sends its record to all ranks.

        Raises:
            ConfigError: the monitored metric is not measured on this machine.
            TrainingError: a loss or metric is not finite.
        """
        save_s = train_metrics[SAVE_S.name] + eval_pass.save_s
        epoch_s = train_metrics[TRAIN_S.name] + eval_pass.metrics[EVAL_S.name] + save_s
        times = {SAVE_S.name: save_s, EPOCH_S.name: epoch_s}
        metrics = {**train_metrics, **eval_pass.metrics, **times, **measure_peak_memory(self.device)}
        metrics = drop_non_finite(metrics, self.monitor.metric.name, f"epoch {progress.epoch + 1}")
        rank_record = {
            "epoch": progress.epoch,
            **metrics,
            "first_of_start": self._is_first_of_start,
            "ended_at": time.time(),
            "steps": progress.logged_steps(),
        }
        # The ranks must agree on the best and the last epoch, and the monitored metric can be a time, which differs.
        record: EpochRecord = self.world.broadcast_object(lambda: rank_record)
        if self.config.log.per_class:
            matrix = eval_pass.predictions.confusion_matrix()
            record["classes"] = compute_class_metrics(matrix, classes)
        if record[self.monitor.metric.name] is None:
            raise ConfigError(f"monitor={self.config.monitor}: is not measured on this machine")
        self.result.epochs.append(record)
        self._is_first_of_start = False

    def send_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Send those logged steps of an epoch to the loggers that they do not have yet; raises `OSError`."""
        for logger in self._loggers:
            logger.add_steps(steps[self._num_sent_steps :])
        self._num_sent_steps = len(steps)

    def write_epoch(self, draw_images: DrawImages, is_last: bool) -> None:
        """Write the last epoch to `epochs.csv` and the log, and send it to the loggers; raises `OSError`."""
        record, interval = self.result.epochs[-1], self.config.log.images_every_epochs
        self.send_steps(record["steps"])
        self._num_sent_steps = 0
        if self.world.is_main:
            self.result.write_epochs()
            for logger in self._loggers:
                logger.add_epoch(record)
            epoch = record["epoch"]
            if self._loggers and interval and (is_last or (epoch + 1) % interval == 0):
                images = draw_images(epoch)
                for logger in self._loggers:
                    logger.add_images(images, epoch)
        log_epoch(self.result, self.config.epochs_to_train, self.monitor.metric)

    def record_end(self) -> None:
        """Record and log whether the run stopped early."""
        self.result.stopped_early = len(self.result.epochs) < self.config.epochs_to_train
        log_early_stop(self.result, self.monitor)

    def record_test(self, metrics: Mapping[str, float]) -> None:
        """Record and log the metrics of the best weights on the test split; raises `TrainingError` as `add_epoch`."""
        finite = drop_non_finite(metrics, self.monitor.metric.name, "test split")
        self.result.test = {"weights": "best", **finite}
        best = self.monitor.best_epoch(self.result.epochs)
        assert best is not None  # `add_epoch` refuses an epoch without a value.
        log_test(finite, best + 1, self.monitor.metric)
