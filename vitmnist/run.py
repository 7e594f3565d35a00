"""One run, from its configuration to its records."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vitmnist.checkpoint import storage
from vitmnist.checkpoint.manager import CheckpointManager, load_checkpoint
from vitmnist.checkpoint.storage import read_initial_weights
from vitmnist.config.schema import Config
from vitmnist.config.values import to_plain_dict
from vitmnist.errors import DataError, TrainingError, classify
from vitmnist.loaders.base import LOADERS
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import EpochTimer, profiled
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.tracking.environment import HardwareFigures, describe_environment
from vitmnist.tracking.epoch_table import (
    EpochRecord,
    Monitor,
    check_numbers,
    epoch_record,
    find_metric,
    may_train_longer,
)
from vitmnist.tracking.images import epoch_images
from vitmnist.tracking.log import log_early_stop, log_epoch, log_setup, log_test, log_verdict
from vitmnist.tracking.loggers import LOGGERS, Logger, parse_loggers
from vitmnist.tracking.result import Result, choices_of, recording_outcome
from vitmnist.training.loop import EpochProgress, Predictions, evaluate, train_epoch
from vitmnist.training.setup import agree_on_device, build_setup, split_sampler

log = logging.getLogger(__name__)


def run(
    config: Config,
    folder: Path,
    overrides: list[str],
    stop: StopSignal,
    world: World = SINGLE_PROCESS,
) -> Result:
    """Train and evaluate as configured, or resume the run in `folder`; write its records there.

    With several processes, all of them call this; rank 0 writes the records.

    Args:
        config: with `resume`, the newest checkpoint in the folder is continued if there is one.
        folder: an existing folder, locked by the caller; gets `result.json`, `epochs.csv`, a TensorBoard event file and
            checkpoints.
        overrides: command-line overrides, only stored.
        stop: asks the run to stop before its end; listens once training has begun.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used; nothing is recorded.
        PeerError: another process failed before the run began; nothing is recorded.
        TrainingError: training cannot continue; recorded.
        RunInterrupted: the run was asked to stop; recorded and saved.
    """
    values = to_plain_dict(config)
    deadline = math.inf if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes
    result = Result(overrides=overrides, choices=choices_of(values), config=values)
    with ExitStack() as until_recorded, recording_outcome(result, config, folder, stop, world):
        with ExitStack() as stack:
            trainer = Trainer(config, folder, result, stop, world, stack)
            # `finish_epoch` adds the wait for the first batch.
            result.setup_s = time.time() - result.began_at - (result.compile_s or 0.0)
            # From here on a signal stops the run after a step, when it can be saved. Before, there is nothing to lose.
            until_recorded.enter_context(stop.listening(deadline))
            setup, step = trainer.setup, trainer.setup.step
            while not trainer.is_done():
                progress = trainer.start_epoch()
                with trainer.instrument(progress, is_training=True) as after_step:
                    train = train_epoch(step, setup.train_loader, progress, after_step)
                with trainer.instrument(progress, is_training=False) as after_step:
                    evaluation, predictions = evaluate(
                        step.eval_model, setup.eval_loader, step.preprocess, after_step, world
                    )
                trainer.finish_epoch(progress, train, evaluation, predictions)
            result.stopped_early = len(result.epochs) < config.epochs
            log_early_stop(result, trainer.monitor)
            trainer.checkpoints.save_final_weights()
            trainer.evaluate_on_test()
        log_verdict(result)
    return result


class Trainer:
    """A run that is set up, with its checkpoints, records and progress bar. Fills in `result` during the run.

    Args:
        stack: closes what the run has opened.

    Raises:
        ConfigError: something in the configuration is unknown, does not fit together, or may not change on resuming.
        DataError: the data or the checkpoints cannot be read.
    """

    def __init__(
        self, config: Config, folder: Path, result: Result, stop: StopSignal, world: World, stack: ExitStack
    ) -> None:
        self.config, self.folder, self.result, self.world = config, folder, result, world
        self.is_first_epoch = True  # since the start or resume of this process
        self.monitor = Monitor(find_metric(config.monitor, "monitor"), config.patience)
        loggers = parse_loggers(config.logger)
        device = agree_on_device(config, world)
        result.batch_size, result.seed, result.device = config.batch_size, config.seed, str(device)
        result.distributed = {"ranks": world.size} if world.size > 1 else None
        checkpoint = load_checkpoint(config, folder, world) if config.resume else None
        step_config = weights = None
        if checkpoint:
            result.epochs, result.resumed = checkpoint.epochs, True
            step_config = checkpoint.reusable_step_config(config, device.type, world.size)
        elif config.init:
            weights = world.broadcast_object(partial(read_initial_weights, config.init))
        self.setup = setup = build_setup(config, device, stack, world, step_config, weights)
        self.record_setup(device)
        self.checkpoints = CheckpointManager(folder, config, setup, result, stop, world, self.monitor)
        self.resumed_progress = self.checkpoints.restore(checkpoint) if checkpoint else None
        # A run that had stopped early trains on if it may train longer than before.
        self.must_train = bool(
            checkpoint and (checkpoint.progress or may_train_longer(checkpoint.config, to_plain_dict(config)))
        )
        self.hardware = HardwareFigures(device)  # after set-up, whose memory and GPU time it must not count
        log_setup(config, setup, result, device, world)
        self.loggers: list[Logger] = []
        if world.is_main:
            self.loggers = [stack.enter_context(LOGGERS.build(values, folder, result)) for values in loggers]
            result.write_config(folder)
            result.write_epochs(folder)  # drops what was recorded after the checkpoint, and a row that was cut off
            for earlier in ("result.json", f"{storage.FOLDER}/final.safetensors"):
                (folder / earlier).unlink(missing_ok=True)

    def record_setup(self, device: torch.device) -> None:
        """Record dataset, loader choice, options of the step and environment."""
        result, setup, dataset = self.result, self.setup, self.setup.dataset
        if setup.selection:
            result.choices["loader"] = setup.selection.values["name"]
            result.auto = setup.selection.record()
        result.loader, result.eval_split = {**setup.train_loader.settings}, dataset.eval_split
        result.trainer, result.compile_s = setup.step.config.to_dict(), setup.step.compile_s or None
        result.dataset = {
            "name": dataset.name,
            **{f"{name}_size": len(split) for name, split in dataset.splits.items()},
            "skipped": dataset.skipped,
            "sha256": self.world.broadcast_object(lambda: dataset.sha256),
            **({"folds_of": dataset.folds_of} if dataset.folds_of else {}),
        }
        result.environment = describe_environment(device) if self.world.is_main else None

    def is_done(self) -> bool:
        """Whether all epochs are done, or none has been better for as long as `patience` allows."""
        epochs = self.result.epochs
        must_train = self.is_first_epoch and self.must_train
        return len(epochs) >= self.config.epochs or (self.monitor.is_exhausted(epochs) and not must_train)

    def start_epoch(self) -> EpochProgress:
        """The progress of the next epoch: that of the checkpoint if it was saved in the middle, else a new one."""
        progress, self.resumed_progress = self.resumed_progress, None
        return progress or self.checkpoints.new_progress(len(self.result.epochs))

    @contextmanager
    def instrument(self, progress: EpochProgress, *, is_training: bool) -> Iterator[Callable[[EpochTimer], None]]:
        """Set up progress bar, profiler and checkpoints around a pass; yields what to call after each step."""
        setup = self.setup
        profiler: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        loader, name, done = setup.eval_loader, setup.dataset.eval_split, 0
        if is_training:
            loader, name, done = setup.train_loader, "train", progress.metrics.steps
            if self.config.profile and self.is_first_epoch and self.world.is_main:
                profiler = profiled(self.folder, len(loader) - done, setup.step.device)
        look: dict[str, Any] = {"desc": f"epoch {progress.epoch + 1} {name}", "unit": "batch", "leave": False}
        look["disable"] = None if self.world.is_main else True  # None: show it only if stderr is a terminal
        bar = tqdm(total=len(loader), initial=done, mininterval=0.5, **look)
        with profiler as next_step, bar:

            def after_step(timer: EpochTimer) -> None:
                bar.update()
                next_step()
                self.checkpoints.after_step(progress, timer)

            yield after_step

    def finish_epoch(
        self, progress: EpochProgress, train: dict[str, float], evaluation: dict[str, float], predictions: Predictions
    ) -> None:
        """Record, log and save a completed epoch.

        Raises:
            TrainingError: the evaluation loss is not finite.
            DataError: a record or the checkpoint cannot be written; if it is a record, the checkpoint is saved first.
            RunInterrupted: the run is to stop, and is saved.
        """
        epoch, config = progress.epoch, self.config
        if not math.isfinite(evaluation["eval_loss"]):
            raise TrainingError(
                f"the evaluation loss is {evaluation['eval_loss']} after epoch {epoch + 1}, at learning rate "
                f"{self.setup.step.lr:g}; try a smaller optimizer.lr"
            )
        save_s = train["save_s"] + evaluation["save_s"]
        metrics = {
            **train,
            **evaluation,
            "epoch_s": train["train_s"] + evaluation["eval_s"] + save_s,
            "save_s": save_s,
            **self.hardware.metrics(),
        }
        record = epoch_record(epoch, metrics, progress.logged_steps(), self.is_first_epoch)
        if self.is_first_epoch and self.result.setup_s is not None:
            self.result.setup_s += progress.timer.first_wait()
        self.result.epochs.append(record)
        self.is_first_epoch = False
        is_last = self.is_done()
        try:  # before the checkpoint: on resuming, events after the last checkpoint are purged
            self.write_records(record, predictions, is_last)
        except OSError as error:
            self.checkpoints.after_epoch(is_last, must_save=True)
            raise DataError(f"cannot write the records: {classify(error).message}") from error
        log_epoch(record, config.epochs)
        self.checkpoints.after_epoch(is_last)

    def evaluate_on_test(self) -> None:
        """Evaluate the best weights on the test split, if epochs were evaluated on a validation split.

        Raises:
            TrainingError: a loss or metric that no record may have.
        """
        setup, world = self.setup, self.world
        if setup.dataset.validation is None or setup.dataset.test is None:
            return
        name = self.checkpoints.load_best_weights()
        for loader in (setup.train_loader, setup.eval_loader):
            loader.close()  # there may be no memory for a third set
        sampler = split_sampler(setup.dataset.test, setup.eval_loader.sampler.global_sampler.batch_size, world)
        with LOADERS.build(setup.loader_values, setup.dataset.test, sampler, setup.step.device) as loader:
            metrics, _ = evaluate(setup.step.eval_model, loader, setup.step.preprocess, world=world)
        values = {key.replace("eval_", "test_"): value for key, value in metrics.items() if key.startswith("eval_")}
        try:
            check_numbers(values)
        except ValueError as error:
            raise TrainingError(f"test split: {error}") from error
        self.result.test = {"weights": name, **values}
        log_test(self.result, self.monitor)

    def write_records(self, record: EpochRecord, predictions: Predictions, is_last: bool) -> None:
        """Append to `epochs.csv`, and log the epoch; raises `OSError` if that fails."""
        if not self.world.is_main:
            return
        epoch, every = record["epoch"], self.config.log.images_every_epochs
        self.result.append_epoch(self.folder)
        for logger in self.loggers:
            logger.add_epoch(record)
        if self.loggers and every and (is_last or (epoch + 1) % every == 0):
            images = epoch_images(self.setup, predictions, epoch)
            for logger in self.loggers:
                logger.add_images(images, epoch)
