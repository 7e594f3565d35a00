"""One run, from its configuration to its records: `Trainer` is the only class that knows all parts."""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vitmnist.augment.preprocess import Preprocess, build_augment
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.manager import Checkpoint, CheckpointManager, load_checkpoint
from vitmnist.checkpoint.storage import read_initial_weights
from vitmnist.config.schema import Config
from vitmnist.config.values import to_plain_dict
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, TrainingError, classify
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, ResidentBatch, candidate_of, select_loader
from vitmnist.loaders.base import LOADERS, Loader, needs_of
from vitmnist.losses import LOSSES
from vitmnist.optim.optimizers import EMA, OPTIMIZERS
from vitmnist.optim.schedules import build_schedule
from vitmnist.runtime.device import agree_on_device, use_deterministic_kernels
from vitmnist.runtime.memory import check_fits, keep_freed_memory
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import EpochTimer, profiled
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.timing.benchmark import Candidate
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
from vitmnist.training.data import eval_sampler, read_dataset, train_sampler
from vitmnist.training.fine_tuning import scale_learning_rates
from vitmnist.training.loop import EpochProgress, Predictions, evaluate, train_epoch
from vitmnist.training.model import build_model, check_batch_norm, check_config
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepConfig, resolve_step_config

log = logging.getLogger(__name__)


class Trainer:
    """Trains and evaluates as configured, or resumes the run in `folder`; writes its records there.

    `fit` calls the other methods in the order in which they stand here. With several processes, all of them call it;
    rank 0 writes the records.

    Args:
        config: with `resume`, the newest checkpoint in the folder is continued if there is one.
        folder: an existing folder, locked by the caller; gets `result.json`, `epochs.csv`, a TensorBoard event file and
            checkpoints.
        overrides: command-line overrides, only stored.
        stop: asks the run to stop before its end; listens once training has begun.

    Raises:
        ConfigError: there is no such device, logger or metric.
    """

    checkpoint: Checkpoint | None = None
    """From which the run is resumed; None once it is restored."""
    weights: Mapping[str, Tensor] | None = None
    """What `init` names; None once the model has them."""
    dataset: Dataset
    sampler: EpochSampler
    step: TrainStep
    train_loader: Loader
    eval_loader: Loader
    loader_values: Mapping[str, Any]
    """The configuration of both loaders, with what `auto` chose."""
    selection: LoaderSelection | None = None
    """The measurement behind `data/loader=auto`."""
    checkpoints: CheckpointManager
    must_train = False
    """A run that had stopped early trains on, because it may train longer than before."""
    hardware: HardwareFigures

    def __init__(
        self, config: Config, folder: Path, overrides: list[str], stop: StopSignal, world: World = SINGLE_PROCESS
    ) -> None:
        self.config, self.folder, self.stop, self.world = config, folder, stop, world
        self.monitor = Monitor(find_metric(config.monitor, "monitor"), config.patience)
        self.logger_values = parse_loggers(config.logger)
        self.loggers: list[Logger] = []
        self.device = agree_on_device(config.device, world)
        # Before anything runs on the device: torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product.
        use_deterministic_kernels(config.trainer.deterministic, self.device)
        self.is_first_epoch = True  # since the start or resume of this process
        self.stack = ExitStack()
        """Closes loaders and loggers."""
        self.loader_stack = self.stack.enter_context(ExitStack())
        values = to_plain_dict(config)
        self.result = Result(
            overrides=overrides,
            choices=choices_of(values),
            config=values,
            batch_size=config.batch_size,
            seed=config.seed,
            device=str(self.device),
            distributed={"ranks": world.size} if world.size > 1 else None,
        )

    def fit(self) -> Result:
        """Train and evaluate, and record it.

        Raises:
            ConfigError, DataError: the configuration or the data cannot be used; nothing is recorded.
            PeerError: another process failed before the run began; nothing is recorded.
            TrainingError: training cannot continue; recorded.
            RunInterrupted: the run was asked to stop; recorded and saved.
        """
        config, result, world = self.config, self.result, self.world
        deadline = math.inf if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes
        with ExitStack() as until_recorded, recording_outcome(result, config, self.folder, self.stop, world):
            with self.stack:
                self.build_data()
                self.build_step()
                self.build_loaders()
                self.distribute()
                self.record_setup()
                progress = self.restore()
                self.open_records()
                # `finish_epoch` adds the wait for the first batch.
                result.setup_s = time.time() - result.began_at - (result.compile_s or 0.0)
                # From here on a signal stops the run after a step, when it can be saved. Before, nothing can be lost.
                until_recorded.enter_context(self.stop.listening(deadline))
                step = self.step
                while not self.is_done():
                    with self.instrument(progress, is_training=True) as after_step:
                        train = train_epoch(step, self.train_loader, progress, after_step)
                    with self.instrument(progress, is_training=False) as after_step:
                        evaluation, predictions = evaluate(
                            step.eval_model, self.eval_loader, step.preprocess, after_step, world
                        )
                    self.finish_epoch(progress, train, evaluation, predictions)
                    progress = self.new_progress()
                result.stopped_early = len(result.epochs) < config.epochs
                log_early_stop(result, self.monitor)
                self.checkpoints.save_final_weights()
                self.evaluate_on_test()
            log_verdict(result)
        return result

    def build_data(self) -> None:
        """Read checkpoint or initial weights, and the dataset, and divide its batches among the ranks.

        Raises:
            ConfigError: a key has changed that may not on resuming, or something is unknown or does not fit together.
            DataError: the checkpoint, the weights or the data cannot be read.
        """
        if self.config.resume:
            self.checkpoint = load_checkpoint(self.config, self.folder, self.world)
        if self.checkpoint:
            self.result.epochs, self.result.resumed = self.checkpoint.epochs, True
        elif self.config.init:
            self.weights = self.world.broadcast_object(partial(read_initial_weights, self.config.init))
        check_config(self.config, self.device)
        self.dataset = read_dataset(self.config, self.world)
        self.sampler = train_sampler(self.config, self.dataset, self.world)

    def build_step(self) -> None:
        """Build model, optimizer, schedule and loss, and the step that uses them."""
        config, device, train, sampler = self.config, self.device, self.dataset.train, self.sampler
        if device.type == "cpu":
            keep_freed_memory()
        options, preprocess = self.step_config(), Preprocess(train, build_augment(config.data.augment)).to(device)
        model = build_model(config, train, device, self.weights)
        self.weights = None
        optimizer = OPTIMIZERS.build(config.optimizer, model, options.fused)
        frozen_norms = scale_learning_rates(optimizer, model, config.lr_scale)
        schedule = build_schedule(config.schedule, config.epochs, len(sampler))
        loss = LOSSES.build(config.loss, train.labels, train.classes, device)
        ema = EMA(model, config.ema_decay) if config.ema_decay else None
        self.step = TrainStep(
            model=model,
            preprocess=preprocess,
            optimizer=optimizer,
            schedule=schedule,
            loss=loss,
            batch_size=min(sampler.rank_batch_size, sampler.size),
            config=options,
            clip_norm=config.trainer.clip_norm,
            ema=ema,
            frozen_norms=frozen_norms,
        )
        check_batch_norm(config.model["name"], self.step, train, sampler, self.world)

    def step_config(self) -> StepConfig:
        """The options of the step, from the checkpoint if they still apply, else resolved by rank 0 for all."""
        config, device, world, sampler = self.config, self.device, self.world, self.sampler
        before, now = self.checkpoint, (to_plain_dict(config)["trainer"], device.type, world.size)
        if before and (before.config.get("trainer"), before.device, len(before.rng)) == now:
            values = before.step_config
        else:
            sizes = min(sampler.rank_batch_size, sampler.size), config.epochs * sampler.size
            values = world.broadcast_object(lambda: resolve_step_config(config.trainer, device, *sizes).to_dict())
        options = StepConfig.from_dict(values)
        if options.reasons:
            log.info("trainer options chosen for %s:\n%s", device, options.describe())
        return options

    def build_loaders(self) -> None:
        """Build the loaders of training and evaluation, and compile the step for what they deliver."""
        step, world, evaluated = self.step, self.world, self.dataset.evaluated
        # Evaluation keeps no activations, so what fits in training fits here. All ranks take the size of rank 0: their
        # own may differ by one image.
        eval_batch = world.broadcast_object(lambda: step.microbatch_size) * world.size
        sets = [(self.dataset.train, self.sampler), (evaluated, eval_sampler(evaluated, eval_batch, world))]
        values = self.config.data.loader
        if isinstance(options := LOADERS.member(values)[1], AutoOptions):
            self.selection = self.time_loaders(options) if world.is_main else None
            name = world.broadcast_object(lambda: self.selection.name if self.selection else None)
            values = LOADERS.complete({"name": name})
        # All together, because the first loader may leave no room for the second.
        needs = needs_of(values, sets, self.device)
        check_fits(values["name"], needs, self.device, others=("ram", "cache", "disk"))
        loaders = [self.loader_stack.enter_context(LOADERS.build(values, *data, self.device)) for data in sets]
        self.loader_values, (self.train_loader, self.eval_loader) = values, loaders
        step.compile(self.train_loader)
        if step.compile_s:
            log.info("compilation took %.1f s, which no epoch includes", step.compile_s)

    def time_loaders(self, options: AutoOptions) -> LoaderSelection:
        """Time the loaders with the run's own training step, then restore its state."""
        step, train, sampler = self.step, self.dataset.train, self.sampler
        initial = copy.deepcopy(step.state_dict())

        # Before the timing, so that the memory of compiling does not count as memory that a loader must leave free.
        step.compile(ResidentBatch(train, sampler, step.device))

        def as_candidate(loader: Loader) -> Candidate:
            step.compile(loader)  # once more if the loader delivers floats
            return candidate_of(loader, step.device, step, lambda epoch: step.batches(loader, epoch))

        log.info("timing %s for a few batches each", ", ".join(options.candidates or ()) or "all loaders")
        try:
            selection, _ = select_loader(options, train, sampler, step.device, as_candidate=as_candidate)
        finally:
            step.load_state_dict(initial)
            step.model.zero_grad()
        log.info("expected time per loader\n%s", selection.table())
        return selection

    def distribute(self) -> None:
        """Connect the ranks for training, and seed their generators."""
        self.world.connect(self.device, self.config.distributed.timeout_s)
        self.step.distribute(self.world)
        seed = self.config.seed + self.world.rank  # random layers such as dropout must differ, as the images do
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def record_setup(self) -> None:
        """Record dataset, loader choice, options of the step and environment."""
        result, dataset = self.result, self.dataset
        if self.selection:
            result.choices["loader"] = self.selection.name
            result.auto = asdict(self.selection)
        result.loader, result.eval_split = {**self.train_loader.settings}, dataset.eval_split
        result.trainer, result.compile_s = self.step.config.to_dict(), self.step.compile_s or None
        result.dataset = {
            "name": dataset.name,
            **{f"{name}_size": len(split) for name, split in dataset.splits.items()},
            "skipped": dataset.skipped,
            "sha256": self.world.broadcast_object(lambda: dataset.sha256),
            **({"folds_of": dataset.folds_of} if dataset.folds_of else {}),
        }
        result.environment = describe_environment(self.device) if self.world.is_main else None

    def restore(self) -> EpochProgress:
        """Restore the checkpoint, if there is one; returns the progress of the next epoch, or of one under way.

        Raises:
            DataError: the checkpoint is damaged, or of another dataset.
        """
        self.checkpoints = CheckpointManager(
            folder=self.folder,
            config=self.config,
            dataset=self.dataset,
            step=self.step,
            result=self.result,
            stop=self.stop,
            world=self.world,
            monitor=self.monitor,
        )
        progress, checkpoint, self.checkpoint = self.new_progress(), self.checkpoint, None
        if not checkpoint:
            return progress
        self.checkpoints.restore(checkpoint, progress)
        epochs, config = int(checkpoint.config["epochs"]), self.config
        self.must_train = bool(checkpoint.progress) or may_train_longer(checkpoint.config, to_plain_dict(config))
        if epochs != config.epochs and config.schedule["name"] != "constant":
            log.warning(
                "epochs=%d (it was %d): schedule=%s continues at this step of the new curve, so the run differs from "
                "one that was started with epochs=%d",
                *(config.epochs, epochs, config.schedule["name"], config.epochs),
            )
        return progress

    def open_records(self) -> None:
        """Log the run, open its loggers, and remove what was recorded after the checkpoint."""
        result, folder = self.result, self.folder
        self.hardware = HardwareFigures(self.device)  # after set-up, whose memory and GPU time it must not count
        log_setup(self.config, result, self.dataset, self.step, self.train_loader, self.world)
        if self.world.is_main:
            self.loggers = [
                self.stack.enter_context(LOGGERS.build(values, folder, result)) for values in self.logger_values
            ]
            result.write_config(folder)
            result.write_epochs(folder)  # drops what was recorded after the checkpoint, and a row that was cut off
            for earlier in ("result.json", f"{storage.FOLDER}/final.safetensors"):
                (folder / earlier).unlink(missing_ok=True)

    def is_done(self) -> bool:
        """Whether all epochs are done, or none has been better for as long as `patience` allows."""
        epochs, must_train = self.result.epochs, self.must_train and self.is_first_epoch
        return len(epochs) >= self.config.epochs or (self.monitor.is_exhausted(epochs) and not must_train)

    def new_progress(self) -> EpochProgress:
        """The progress of the next epoch, at its beginning."""
        epoch, log_every = len(self.result.epochs), self.config.log.every_steps
        return EpochProgress(epoch, self.sampler, self.device, log_every, self.world)

    @contextmanager
    def instrument(self, progress: EpochProgress, *, is_training: bool) -> Iterator[Callable[[EpochTimer], None]]:
        """Set up progress bar, profiler and checkpoints around a pass; yields what to call after each step."""
        profiler: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        loader, name, done = self.eval_loader, self.dataset.eval_split, 0
        if is_training:
            loader, name, done = self.train_loader, "train", progress.metrics.steps
            if self.config.profile and self.is_first_epoch and self.world.is_main:
                profiler = profiled(self.folder, len(loader) - done, self.device)
        options: dict[str, Any] = {"desc": f"epoch {progress.epoch + 1} {name}", "unit": "batch", "leave": False}
        options["disable"] = None if self.world.is_main else True  # None: show it only if stderr is a terminal
        bar = tqdm(total=len(loader), initial=done, mininterval=0.5, **options)
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
            TrainingError: a loss or metric that no record may have.
            DataError: a record or the checkpoint cannot be written; if it is a record, the checkpoint is saved first.
            RunInterrupted: the run is to stop, and is saved.
        """
        epoch, config = progress.epoch, self.config
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
        # Rank 0's record for all: `monitor` may be a time, and all ranks must see the same best and last epoch.
        record = self.world.broadcast_object(partial(dict, record))
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
        dataset, step = self.dataset, self.step
        if dataset.validation is None or dataset.test is None:
            return
        name = self.checkpoints.load_best_weights()
        sampler = eval_sampler(dataset.test, self.eval_loader.sampler.batch_size, self.world)
        self.loader_stack.close()
        del self.train_loader, self.eval_loader  # with their sets: there may be no memory for a third one
        with LOADERS.build(self.loader_values, dataset.test, sampler, self.device) as loader:
            metrics, _ = evaluate(step.eval_model, loader, step.preprocess, world=self.world)
        values = {key.replace("eval_", "test_"): value for key, value in metrics.items() if key.startswith("eval_")}
        check_numbers(values, lambda reason: TrainingError(f"test split: {reason}"))
        self.result.test = {"weights": name, **values}
        log_test(self.result, self.monitor)

    def write_records(self, record: EpochRecord, predictions: Predictions, is_last: bool) -> None:
        """Append to `epochs.csv`, and log the epoch; raises `OSError` if that fails."""
        if not self.world.is_main:
            return
        epoch, interval = record["epoch"], self.config.log.images_every_epochs
        self.result.append_epoch(self.folder)
        for logger in self.loggers:
            logger.add_epoch(record)
        if self.loggers and interval and (is_last or (epoch + 1) % interval == 0):
            images = epoch_images(self.dataset, self.train_loader, self.step.preprocess, predictions, epoch)
            for logger in self.loggers:
                logger.add_images(images, epoch)
