"""One run, from its configuration to its records: `Trainer` is the only class that knows all parts."""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
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
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, classify
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, select_loader
from vitmnist.loaders.base import LOADERS, Loader, needs_of
from vitmnist.losses import LOSSES
from vitmnist.metrics.epoch_table import (
    EPOCH_S,
    EVAL_S,
    SAVE_S,
    TRAIN_S,
    EpochRecord,
    Monitor,
    check_metrics,
    epoch_record,
    find_metric,
)
from vitmnist.optim.optimizers import EMA, OPTIMIZERS
from vitmnist.optim.schedules import build_schedule
from vitmnist.runtime.device import choose_device, use_deterministic_kernels
from vitmnist.runtime.memory import Memory, check_fits, keep_freed_memory
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.timing.benchmark import Candidate
from vitmnist.tracking.environment import PeakMemory, describe_environment
from vitmnist.tracking.images import epoch_images
from vitmnist.tracking.log import log_early_stop, log_epoch, log_setup, log_test, log_verdict
from vitmnist.tracking.loggers import LOGGERS, Logger, parse_loggers
from vitmnist.tracking.result import Result, recording_outcome
from vitmnist.training.fine_tuning import scale_learning_rates
from vitmnist.training.loop import AfterStep, EpochProgress, Predictions, evaluate, train_epoch
from vitmnist.training.setup import build_model, check_batch_norm, check_config, read_dataset, train_sampler
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepConfig, resolve_step_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """What a run trains on, and the state from which it starts.

    Args:
        sampler: this rank's part of the training batches.
        checkpoint: from which the run is resumed.
        weights: the weights that `init` names.
    """

    dataset: Dataset
    sampler: EpochSampler
    checkpoint: Checkpoint | None
    weights: Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Loaders:
    """The loaders of training and evaluation.

    Args:
        options: the configuration of both, with what `auto` chose.
        selection: the measurement behind `data/loader=auto`.
    """

    train: Loader
    evaluation: Loader
    options: Mapping[str, Any]
    selection: LoaderSelection | None


class Trainer:
    """Trains and evaluates as configured, or resumes the run in `folder`; writes its records there.

    `fit` calls the other methods in the order in which they stand here, and passes on what they return. With several
    processes, all of them call it; rank 0 writes the records.

    Args:
        config: with `resume`, the newest checkpoint in the folder is continued if there is one.
        folder: an existing folder, locked by the caller; gets `result.json`, `epochs.csv`, a TensorBoard event file and
            checkpoints.
        overrides: command-line overrides, only stored.
        stop: asks the run to stop before its end; listens once training has begun.

    Raises:
        ConfigError: there is no such device, logger or metric.
    """

    def __init__(
        self, config: Config, folder: Path, overrides: list[str], stop: StopSignal, world: World = SINGLE_PROCESS
    ) -> None:
        self.config, self.folder, self.stop, self.world = config, folder, stop, world
        self.monitor = Monitor(find_metric(config.monitor, "monitor"), config.patience)
        self.logger_options = parse_loggers(config.logger)
        self.device = choose_device(config.device, world)
        if world.size > 1 and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # Before anything runs on the device: torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product.
        use_deterministic_kernels(config.trainer.deterministic, self.device)
        self.stack = ExitStack()
        """Closes loaders and loggers."""
        self.loader_stack = self.stack.enter_context(ExitStack())
        self.result = Result(
            overrides=overrides,
            config=to_plain_dict(config),
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
                data = self.build_data()
                step = self.build_step(data)
                loaders = self.build_loaders(data, step)
                self.distribute(step)
                self.record_setup(data.dataset, step, loaders)
                checkpoints = CheckpointManager(
                    self.folder, config, data.dataset, step, result, self.stop, world, self.monitor
                )
                progress = self.restore(data, checkpoints)
                recorder = self.open_records(loaders, checkpoints)
                data = replace(data, checkpoint=None, weights=None)  # frees their memory
                # `finish_epoch` adds the wait for the first batch.
                result.setup_s = time.time() - result.began_at - (result.compile_s or 0.0)
                # From here on a signal stops the run after a step, when it can be saved. Before, nothing can be lost.
                until_recorded.enter_context(self.stop.listening(deadline))
                while progress.metrics.steps or not recorder.is_done():  # an epoch under way is completed first
                    with recorder.instrument(progress, "train", loaders.train) as after_step:
                        train = train_epoch(step, loaders.train, progress, after_step)
                    with recorder.instrument(progress, data.dataset.eval_split, loaders.evaluation) as after_step:
                        evaluation, predictions = evaluate(
                            step.eval_model, loaders.evaluation, step.preprocess, after_step, world
                        )
                    recorder.finish_epoch(progress, train, evaluation, predictions)
                    progress = self.new_progress(data.sampler)
                result.stopped_early = len(result.epochs) < config.epochs
                log_early_stop(result, self.monitor)
                checkpoints.save_final_weights()
                loader_options = loaders.options
                self.loader_stack.close()
                del loaders, recorder  # with their sets: there may be no memory for a third one
                self.evaluate_on_test(loader_options, checkpoints)
            log_verdict(result)
        return result

    def build_data(self) -> Data:
        """Read checkpoint or initial weights, and the dataset, and divide its batches among the ranks.

        Raises:
            ConfigError: a key has changed that may not on resuming, or something is unknown or does not fit together.
            DataError: the checkpoint, the weights or the data cannot be read.
        """
        config, world, weights = self.config, self.world, None
        checkpoint = load_checkpoint(config, self.folder, world) if config.resume else None
        if checkpoint:
            self.result.epochs, self.result.resumed = checkpoint.epochs, True
        elif config.init:
            weights = world.broadcast_object(partial(read_initial_weights, config.init))
        check_config(config, self.device)
        dataset = read_dataset(config, world)
        return Data(dataset, train_sampler(config, dataset, world), checkpoint, weights)

    def build_step(self, data: Data) -> TrainStep:
        """Build model, optimizer, schedule and loss, and the step that uses them."""
        config, device, train, sampler = self.config, self.device, data.dataset.train, data.sampler
        if device.type == "cpu":
            keep_freed_memory()
        options = self.step_config(data)
        preprocess = Preprocess(train, build_augment(config.data.augment)).to(device)
        model = build_model(config, train, device, data.weights)
        optimizer = OPTIMIZERS.build(config.optimizer, model, options.fused)
        step = TrainStep(
            model=model,
            preprocess=preprocess,
            optimizer=optimizer,
            frozen_norms=scale_learning_rates(optimizer, model, config.lr_scale),
            schedule=build_schedule(config.schedule, config.epochs, len(sampler)),
            loss=LOSSES.build(config.loss, train.labels, train.classes, device),
            batch_size=min(sampler.rank_batch_size, sampler.size),
            config=options,
            clip_norm=config.trainer.clip_norm,
            ema=EMA(model, config.ema_decay) if config.ema_decay else None,
        )
        check_batch_norm(config.model["name"], step, train, sampler)
        return step

    def step_config(self, data: Data) -> StepConfig:
        """The options of the step, from the checkpoint if they still apply, else resolved by rank 0 for all."""
        config, device, world, sampler = self.config, self.device, self.world, data.sampler
        before, now = data.checkpoint, (to_plain_dict(config)["trainer"], device.type, world.size)
        if before and (before.config.get("trainer"), before.device, len(before.rng)) == now:
            values = before.step_config
        else:
            sizes = min(sampler.rank_batch_size, sampler.size), config.epochs * sampler.size
            values = world.broadcast_object(
                lambda: asdict(resolve_step_config(config.trainer, device, *sizes, world.size))
            )
        options = StepConfig(**values)
        if options.reasons:
            log.info("trainer options chosen for %s:\n%s", device, options.describe())
        return options

    def build_loaders(self, data: Data, step: TrainStep) -> Loaders:
        """Build the loaders of training and evaluation, and compile or capture the step for what they deliver."""
        train, evaluated = data.dataset.train, data.dataset.evaluated
        sets = [(train, data.sampler), (evaluated, self.eval_sampler(evaluated, step))]
        values, selection = self.config.data.loader, None
        if isinstance(options := LOADERS.resolve(values)[1], AutoOptions):
            selection = self.time_loaders(options, data, step) if self.world.is_main else None
            name = self.world.broadcast_object(lambda: selection.name if selection else None)
            values = LOADERS.complete({"name": name})
        # All together, because the first loader may leave no room for the second.
        needs = sum((needs_of(values["name"], part, self.device) for part in (train, evaluated)), Memory())
        check_fits(values["name"], needs, self.device, others=("ram", "cache", "disk"))
        loaders = [self.loader_stack.enter_context(LOADERS.build(values, *part, self.device)) for part in sets]
        step.compile(loaders[0])
        if step.compile_s:
            what = "compilation" if step.config.compile else "capturing the graph"
            log.info("%s took %.1f s, which no epoch includes", what, step.compile_s)
        return Loaders(train=loaders[0], evaluation=loaders[1], options=values, selection=selection)

    def eval_sampler(self, split: Split, step: TrainStep) -> EpochSampler:
        """The sampler of an evaluation: this rank's part of all images, in their order."""
        # Evaluation keeps no activations, so a microbatch that fits in training fits here. All ranks take the size of
        # rank 0: their own may differ by one image.
        batch_size = self.world.broadcast_object(lambda: step.microbatch_size) * self.world.size
        return EpochSampler(len(split), batch_size, 0, "none", rank=self.world.rank, ranks=self.world.size)

    def time_loaders(self, options: AutoOptions, data: Data, step: TrainStep) -> LoaderSelection:
        """Time the loaders with the run's own training step, then restore its state."""
        train, sampler = data.dataset.train, data.sampler
        initial = copy.deepcopy(step.state_dict())

        def as_candidate(loader: Loader) -> Candidate:
            step.compile(loader)  # once more if the loader delivers floats
            return Candidate(loader, step.device, step, lambda epoch: step.batches(loader, epoch))

        log.info("timing %s for a few batches each", ", ".join(options.candidates or ()) or "all loaders")
        try:
            selection, _ = select_loader(options, train, sampler, step.device, as_candidate=as_candidate)
        finally:
            step.load_state_dict(initial)
            step.model.zero_grad()
        log.info("expected time per loader\n%s", selection.table())
        return selection

    def distribute(self, step: TrainStep) -> None:
        """Connect the ranks for training, and seed their generators."""
        self.world.connect(self.device, self.config.distributed.timeout_s)
        step.distribute(self.world)
        seed = self.config.seed + self.world.rank  # random layers such as dropout must differ, as the images do
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def record_setup(self, dataset: Dataset, step: TrainStep, loaders: Loaders) -> None:
        """Record dataset, loader choice, options of the step and environment."""
        result, world = self.result, self.world
        if loaders.selection:
            result.auto = asdict(loaders.selection)
        result.loader, result.eval_split = {**loaders.train.settings}, dataset.eval_split
        result.trainer, result.compile_s = asdict(step.config), step.compile_s or None
        result.dataset = {
            "name": dataset.name,
            **{f"{name}_size": len(split) for name, split in dataset.splits.items()},
            "skipped": dataset.skipped,
            "sha256": world.broadcast_object(lambda: dataset.sha256),
            **({"folds_of": dataset.folds_of} if dataset.folds_of else {}),
        }
        result.environment = describe_environment(self.device) if world.is_main else None

    def restore(self, data: Data, checkpoints: CheckpointManager) -> EpochProgress:
        """Restore the checkpoint, if there is one; returns the progress of the next epoch, or of one under way.

        Raises:
            DataError: the checkpoint is damaged, or of another dataset.
        """
        progress, checkpoint = self.new_progress(data.sampler), data.checkpoint
        if not checkpoint:
            return progress
        checkpoints.restore(checkpoint, progress)
        before, now, schedule = int(checkpoint.config["epochs"]), self.config.epochs, self.config.schedule["name"]
        if before != now and schedule != "constant":
            log.warning(
                "epochs=%d (it was %d): schedule=%s continues at this step of the new curve, so the run differs from "
                "one that was started with epochs=%d",
                *(now, before, schedule, now),
            )
        return progress

    def new_progress(self, sampler: EpochSampler) -> EpochProgress:
        """The progress of the next epoch, at its beginning."""
        return EpochProgress(len(self.result.epochs), sampler, self.device, self.config.log.every_steps, self.world)

    def open_records(self, loaders: Loaders, checkpoints: CheckpointManager) -> EpochRecorder:
        """Log the run, open its loggers, and remove what was recorded after the checkpoint."""
        result, folder = self.result, self.folder
        peak_memory = PeakMemory(self.device)  # after set-up, whose memory it must not count
        log_setup(self.config, result, checkpoints.dataset, checkpoints.step, loaders.train, self.world)
        loggers: list[Logger] = []
        if self.world.is_main:
            loggers += [
                self.stack.enter_context(LOGGERS.build(values, folder, result)) for values in self.logger_options
            ]
            result.write_config(folder)
            result.write_epochs(folder)  # drops what was recorded after the checkpoint, and a row that was cut off
            for earlier in ("result.json", f"{storage.FOLDER}/final.safetensors"):
                (folder / earlier).unlink(missing_ok=True)
        return EpochRecorder(checkpoints, loaders, loggers, peak_memory)

    def evaluate_on_test(self, loader_options: Mapping[str, Any], checkpoints: CheckpointManager) -> None:
        """Evaluate the best weights on the test split, if epochs were evaluated on a validation split.

        Raises:
            TrainingError: a loss or metric that no record may have.
        """
        dataset, step = checkpoints.dataset, checkpoints.step
        if dataset.validation is None or dataset.test is None:
            return
        name, sampler = checkpoints.load_best_weights(), self.eval_sampler(dataset.test, step)
        with LOADERS.build(loader_options, dataset.test, sampler, self.device) as loader:
            metrics, _ = evaluate(step.eval_model, loader, step.preprocess, world=self.world)
        values = {
            f"test_{key.removeprefix('eval_')}": value for key, value in metrics.items() if key.startswith("eval_")
        }
        check_metrics(values, "test split")
        self.result.test = {"weights": name, **values}
        log_test(self.result.test)


@dataclass(eq=False)
class EpochRecorder:
    """Records, logs and saves the epochs of a run under way.

    Args:
        loggers: of rank 0; the other ranks have none.
        is_first_epoch: no epoch has ended since the start or resume of this process.
    """

    checkpoints: CheckpointManager
    loaders: Loaders
    loggers: list[Logger]
    peak_memory: PeakMemory
    is_first_epoch: bool = True

    def __post_init__(self) -> None:
        run = self.checkpoints
        self.config, self.dataset, self.result = run.config, run.dataset, run.result
        self.monitor, self.world = run.monitor, run.world

    def is_done(self) -> bool:
        """Whether all epochs are done, or none has been better for as long as `patience` allows."""
        epochs = self.result.epochs
        return len(epochs) >= self.config.epochs or self.monitor.is_exhausted(epochs)

    @contextmanager
    def instrument(self, progress: EpochProgress, split: str, loader: Loader) -> Iterator[AfterStep]:
        """Set up the progress bar and checkpoints around a pass; yields what to call after each step."""
        checkpoints = self.checkpoints  # `after_step` must not keep the loaders, as a reference to `self` would
        bar = tqdm(
            desc=f"epoch {progress.epoch + 1} {split}",
            total=len(loader),
            initial=progress.metrics.steps if loader is self.loaders.train else 0,
            unit="batch",
            leave=False,
            mininterval=0.5,
            disable=None if self.world.is_main else True,  # None: shown only if stderr is a terminal
        )

        def after_step(timer: EpochTimer) -> None:
            bar.update()
            checkpoints.after_step(progress, timer)

        with bar:
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
        result, save_s = self.result, train[SAVE_S.name] + evaluation[SAVE_S.name]
        metrics = {
            **train,
            **evaluation,
            EPOCH_S.name: train[TRAIN_S.name] + evaluation[EVAL_S.name] + save_s,
            SAVE_S.name: save_s,
            **self.peak_memory.metrics(),
        }
        record = epoch_record(progress.epoch, metrics, progress.logged_steps(), self.is_first_epoch)
        if self.is_first_epoch and result.setup_s is not None:
            result.setup_s += progress.timer.first_wait()
        # Rank 0's record for all: `monitor` may be a time, and all ranks must see the same best and last epoch.
        record = self.world.broadcast_object(partial(dict, record))
        result.epochs.append(record)
        self.is_first_epoch = False
        is_last = self.is_done()
        try:  # before the checkpoint: on resuming, events after the last checkpoint are purged
            self.write_records(record, predictions, is_last)
        except OSError as error:
            self.checkpoints.after_epoch(is_last, must_save=True)
            raise DataError(f"cannot write the records: {classify(error).message}") from error
        log_epoch(record, self.config.epochs)
        self.checkpoints.after_epoch(is_last)

    def write_records(self, record: EpochRecord, predictions: Predictions, is_last: bool) -> None:
        """Append to `epochs.csv`, and log the epoch; raises `OSError` if that fails."""
        if not self.world.is_main:
            return
        epoch, interval = record["epoch"], self.config.log.images_every_epochs
        self.result.append_epoch(self.checkpoints.folder)
        for logger in self.loggers:
            logger.add_epoch(record)
        if self.loggers and interval and (is_last or (epoch + 1) % interval == 0):
            preprocess = self.checkpoints.step.preprocess
            images = epoch_images(self.dataset, self.loaders.train, preprocess, predictions, epoch)
            for logger in self.loggers:
                logger.add_images(images, epoch)
