"""Connects dataset, model, loaders, checkpoints and records of a run, and trains."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from vitmnist.augment.preprocess import Preprocess, build_augment
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.manager import CheckpointManager, read_checkpoint_to_resume
from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError, classify_error
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, select_loader
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.losses import LOSSES
from vitmnist.metrics import MetricCollection
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.optim.optimizers import EMA, OPTIMIZERS
from vitmnist.optim.schedules import build_schedule
from vitmnist.run_recorder import RunRecorder
from vitmnist.runtime.device import choose_device, use_deterministic_kernels
from vitmnist.runtime.memory import keep_freed_memory
from vitmnist.runtime.random_state import seed_rank
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.timing.benchmark import LoaderCandidate
from vitmnist.tracking.log import log_bottleneck
from vitmnist.tracking.pictures import draw_epoch_images
from vitmnist.tracking.result import Result
from vitmnist.training import build, checks
from vitmnist.training.fine_tuning import scale_learning_rates
from vitmnist.training.loop import EvalPass, evaluate, train_epoch
from vitmnist.training.model_runner import ModelRunner
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepOptions, resolve_step_options

log = logging.getLogger(__name__)


class Trainer:
    """Trains and evaluates as configured, or resumes the run in `folder`.

    `fit`, and `begin` for it, call the other public methods in the order of their definition. Every rank calls `fit`;
    rank 0 writes the records.

    Args:
        config: the configuration. With `resume`, the run continues from the newest checkpoint in `folder`, if any.
        folder: the folder of the run. It exists, and the caller has locked it. It receives `result.json`, `epochs.csv`,
            checkpoints and the files of the loggers.
        overrides: the command-line overrides, for the record only.
        stop: requests an early stop; listens for signals once training begins.

    Raises:
        ConfigError: the device, a logger, a metric or the monitored metric does not exist.
    """

    def __init__(
        self, config: Config, folder: Path, overrides: list[str], stop: StopSignal, world: World = SINGLE_PROCESS
    ) -> None:
        self.metrics = MetricCollection(config.metrics)
        self.config = config = replace(build.resolve_dataset_options(config), metrics=self.metrics.configs)
        self.folder, self.stop, self.world = folder, stop, world
        self.monitor = Monitor(find_metric(config.monitor, "monitor", self.metrics.infos), config.patience)
        self.device = choose_device(config.device, world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Graphs are captured and memory is pinned on the current device.
        else:
            keep_freed_memory()
        # Do this before any work on the device: torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product.
        use_deterministic_kernels(config.trainer.deterministic, self.device)
        self.recorder = RunRecorder(config, folder, overrides, self.monitor, self.device, world)

    def fit(self) -> Result:
        """Train, evaluate and record the run.

        Raises:
            ConfigError, DataError, PeerError: the run cannot begin on this or another rank; nothing is recorded.
            TrainingError: training cannot continue; recorded.
            RunInterrupted: the run was asked to stop; recorded and saved.
        """
        config, recorder, stop, world = self.config, self.recorder, self.stop, self.world
        deadline = math.inf if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes
        # Restore the signal handlers last: a signal must not kill the process while the outcome is recorded.
        with stop, recorder.record_outcome(stop):
            checks.check_config(config, self.device)
            # Read the checkpoint first: with one, no initial weights are loaded.
            checkpoint = self.load_checkpoint() if config.resume else None
            weights = None if checkpoint else self.load_initial_weights()
            dataset, sampler = self.build_data()
            step = self.build_step(dataset.train, sampler, weights)
            with self.build_loaders(dataset, sampler, step) as (train_loader, eval_loader, loader_config):
                checkpoints, progress = self.begin(dataset, step, train_loader, checkpoint)
                del checkpoint, weights  # Free their memory.

                # From here on, a signal stops the run after the current step, so that progress can be saved.
                stop.listen(deadline)
                # A resumed run first completes the epoch in which it stopped.
                while progress.num_batches > 0 or not self.is_done():
                    with self.progress_bar(progress, len(train_loader) + len(eval_loader)) as bar:
                        after_step = partial(finish_step, bar, checkpoints, progress)
                        train_metrics = train_epoch(step, train_loader, progress, after_step)
                        eval_pass = evaluate(
                            step.evaluated_model, eval_loader, step.preprocess, after_step, world, metrics=self.metrics
                        )
                    self.finish_epoch(progress, train_metrics, eval_pass, dataset, step, checkpoints)
                    progress = self._create_progress(sampler)
            del train_loader, eval_loader  # Free the samples: the test split may not fit next to them.
            recorder.record_end()
            checkpoints.save_final_weights()
            self.evaluate_on_test(dataset, step, checkpoints, loader_config)
        log_bottleneck(recorder.result)
        return recorder.result

    def load_checkpoint(self) -> storage.Checkpoint | None:
        """Load the newest checkpoint, if any, and continue the record after its epochs."""
        if checkpoint := read_checkpoint_to_resume(self.config, self.folder, self.world):
            self.recorder.continue_from(checkpoint["epochs"])
        return checkpoint

    def load_initial_weights(self) -> Mapping[str, Tensor] | None:
        """Read the weights that `init` or `model.weights` names; None if neither does."""
        config, pretrained = self.config, build.find_pretrained(self.config)
        if config.init and pretrained:
            raise ConfigError("init and model.weights both name initial weights; set one of them to null")
        if config.init:
            return self.world.broadcast_object(partial(storage.read_initial_weights, config.init))
        if pretrained:
            if pretrained.weights == "default":
                return self.world.broadcast_object(pretrained.download)
            read = partial(storage.read_initial_weights, str(pretrained.weights), "model.weights")
            return self.world.broadcast_object(read)
        return None

    def build_data(self) -> tuple[Dataset, EpochSampler]:
        """Read the dataset, and build the sampler for this rank's part of the training batches."""
        config, world = self.config, self.world
        dataset = build.read_dataset(config, world)
        checks.check_eval_split(dataset, config)
        checks.check_same_on_machines(dataset, config, world)
        sampler = EpochSampler(
            len(dataset.train),
            config.batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            drop_last=config.data.drop_last,
            rank=world.rank,
            world_size=world.size,
            labels=dataset.train.labels,
        )
        return dataset, sampler

    def build_step(self, train: Split, sampler: EpochSampler, weights: Mapping[str, Tensor] | None) -> TrainStep:
        """Build model, loss, optimizer, schedule and training step."""
        config, device = self.config, self.device
        batch_size = min(sampler.rank_batch_size, sampler.size)
        options = self._resolve_step_options(batch_size, config.epochs_to_train * sampler.size)
        model = build.build_model(config, train.images.shape[1:], len(train.classes), device, weights)
        preprocess = Preprocess(train, build_augment(config.data)).to(device)
        checks.check_loss(config.loss, train, preprocess.has_mixing)
        loss = LOSSES.build(config.loss, train.labels, train.classes, device)
        checks.check_metric_functions(self.metrics, len(train.classes))
        optimizer = OPTIMIZERS.build(config.optimizer, model, options.fused)
        _, optimizer_options = OPTIMIZERS.resolve(config.optimizer)
        frozen = scale_learning_rates(optimizer, model, config.lr_scale, optimizer_options.layer_decay)
        get_history = partial(self.monitor.history, self.recorder.result.epochs)
        schedule = build_schedule(config.schedule, config.epochs, len(sampler), get_history)
        ema = EMA(model, config.ema_decay) if config.ema_decay else None
        runner = ModelRunner(model, preprocess, loss, batch_size, options, frozen, self.metrics)
        step = TrainStep(runner, optimizer, schedule, config.trainer.clip_norm, ema)
        checks.check_weight_average(step)
        checks.check_batch_norm(step, train.images[:1].to(device), sampler)
        return step

    def _resolve_step_options(self, batch_size: int, num_images: int) -> StepOptions:
        """Choose the options of the step on rank 0, for training on `num_images` images, and log the reasons."""
        config, device = self.config.trainer, self.device
        resolve = partial(resolve_step_options, config, device, batch_size, num_images, self.world.size)
        options = StepOptions(**self.world.broadcast_object(lambda: asdict(resolve())))
        if options.reasons:
            log.info("trainer options chosen for %s:\n%s", device, options.describe())
        return options

    @contextmanager
    def build_loaders(
        self, dataset: Dataset, sampler: EpochSampler, step: TrainStep
    ) -> Iterator[tuple[Loader, Loader, Mapping[str, Any]]]:
        """Build the loaders of training and evaluation for the block; also yield `data.loader`, without `auto`."""
        loader_config, train_loader = self.config.data.loader, None
        _, options = LOADERS.resolve(loader_config)
        with ExitStack() as stack:
            if isinstance(options, AutoOptions):
                if self.world.is_main:
                    selection, train_loader = self._time_loaders(options, dataset.train, sampler, step)
                    stack.enter_context(train_loader)
                    self.recorder.record_selection(selection)
                name = self.world.broadcast_object(lambda: selection.name)  # Rank 0 alone calls the function.
                loader_config = options.candidate_config(name)
            if train_loader is None:
                train_loader = stack.enter_context(LOADERS.build(loader_config, dataset.train, sampler, self.device))
            eval_loader = stack.enter_context(self._build_eval_loader(dataset.eval_split, loader_config, step))
            yield train_loader, eval_loader, loader_config

    def _build_eval_loader(self, split: Split, loader_config: Mapping[str, Any], step: TrainStep) -> Loader:
        """Build a loader that delivers this rank's part of a split in order."""
        # Evaluation stores no activations, so the training microbatch fits. All ranks use the size on rank 0, because
        # the sizes of the ranks can differ by one image.
        world = self.world
        batch_size = world.broadcast_object(lambda: step.runner.microbatch_size) * world.size
        sampler = EpochSampler(len(split), batch_size, shuffle="none", rank=world.rank, world_size=world.size)
        return LOADERS.build(loader_config, split, sampler, self.device)

    def _time_loaders(
        self, options: AutoOptions, train: Split, sampler: EpochSampler, step: TrainStep
    ) -> tuple[LoaderSelection, Loader]:
        """Time the loaders with the training step, and restore its state; return the selection and its loader."""

        def make_candidate(loader: Loader) -> LoaderCandidate:
            step.compile_or_capture(loader)  # Compile again for a loader that delivers float32.
            return LoaderCandidate(loader, step.device, step, partial(step.batches, loader))

        log.info("timing %s for a few batches each", ", ".join(options.candidates or ()) or "all loaders")
        with step.preserved_state():
            return select_loader(options, train, sampler, step.device, make_candidate)

    def begin(
        self, dataset: Dataset, step: TrainStep, train_loader: Loader, checkpoint: storage.Checkpoint | None
    ) -> tuple[CheckpointManager, EpochProgress]:
        """Compile, connect the ranks, and restore the checkpoint, if any; return the progress of the next epoch."""
        # Capture before NCCL and the loaders start threads: an allocation by another thread breaks the capture.
        step.compile_or_capture(train_loader)
        self.distribute(step)
        # Seed after all set-up, which draws random numbers; a checkpoint restores the generators after that.
        seed_rank(self.config.seed, self.world.rank)
        self.recorder.record_setup(dataset, step, train_loader)
        checkpoints = CheckpointManager(
            self.config, dataset, step, self.recorder.result, self.stop, self.world, self.recorder.send_steps
        )
        progress = self._create_progress(train_loader.sampler)
        if checkpoint:
            checkpoints.restore(checkpoint, progress)
        self.recorder.begin()
        return checkpoints, progress

    def distribute(self, step: TrainStep) -> None:
        """Connect the ranks for training."""
        self.world.connect(self.device, self.config.distributed.timeout_s)
        step.sum_gradients_over(self.world)

    def _create_progress(self, sampler: EpochSampler) -> EpochProgress:
        """Create the progress of the next epoch, before its first batch."""
        epoch = len(self.recorder.result.epochs)
        return EpochProgress(epoch, sampler, self.device, self.config.log.every_steps, self.world)

    def is_done(self) -> bool:
        """Whether all epochs are done, or the last `patience` epochs in a row were no better than the best epoch."""
        epochs = self.recorder.result.epochs
        return len(epochs) >= self.config.epochs_to_train or self.monitor.is_exhausted(epochs)

    def progress_bar(self, progress: EpochProgress, total_batches: int) -> "tqdm[Any]":
        """Return a bar for the batches of an epoch and its evaluation."""
        return tqdm(
            desc=f"epoch {progress.epoch + 1}",
            total=total_batches,
            initial=progress.num_batches,
            unit="batch",
            leave=False,
            mininterval=0.5,
            disable=None if self.world.is_main else True,  # None: show the bar only if stderr is a terminal.
        )

    def finish_epoch(
        self,
        progress: EpochProgress,
        train_metrics: Mapping[str, Any],
        eval_pass: EvalPass,
        dataset: Dataset,
        step: TrainStep,
        checkpoints: CheckpointManager,
    ) -> None:
        """Record, log and save an epoch. All that happens between two epochs is called here.

        Raises:
            DataError: the records or the checkpoint cannot be written. If the records cannot, the run is saved first.
            RunInterrupted: the run was asked to stop, and has been saved.
        """
        self.recorder.add_epoch(progress, train_metrics, eval_pass, dataset.train.classes)
        draw_images = partial(draw_epoch_images, dataset, progress.sampler, step.preprocess, eval_pass.predictions)
        result, is_last = self.recorder.result, self.is_done()
        # Save the best epoch only with a validation split: selecting it by the test split would bias its accuracy.
        is_best = self.monitor.best_epoch(result.epochs) == len(result.epochs) - 1 and result.eval_split == "validation"
        try:  # Write the records before the checkpoint, because resuming removes records that are newer than it.
            self.recorder.write_epoch(draw_images, is_last)
        except OSError as error:
            checkpoints.save_or_stop_after_epoch(is_last, is_best, must_save=True)
            raise DataError(f"cannot write the records: {classify_error(error).message}") from error
        checkpoints.save_or_stop_after_epoch(is_last, is_best)

    def evaluate_on_test(
        self, dataset: Dataset, step: TrainStep, checkpoints: CheckpointManager, loader_config: Mapping[str, Any]
    ) -> None:
        """Evaluate the best weights on the test split, if the epochs were evaluated on a validation split."""
        if dataset.validation is None or dataset.test is None:
            return
        checkpoints.load_best_weights(self.monitor.best_epoch(self.recorder.result.epochs))
        with self._build_eval_loader(dataset.test, loader_config, step) as loader:
            eval_pass = evaluate(
                step.evaluated_model, loader, step.preprocess, checkpoints.check_stop, self.world, "test", self.metrics
            )
        self.recorder.record_test(eval_pass.metrics)


def finish_step(bar: "tqdm[Any]", checkpoints: CheckpointManager, progress: EpochProgress, timer: EpochTimer) -> None:
    """Advance the bar of an epoch; save within the epoch, or stop, if due."""
    bar.update()
    checkpoints.save_or_stop_in_epoch(progress, timer)
