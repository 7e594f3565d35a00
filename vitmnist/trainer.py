"""Connects dataset, model, loaders, checkpoints and records of a run, and trains."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from vitmnist.augment.preprocess import Preprocess, build_augment
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.manager import CheckpointManager, read_checkpoint_to_resume
from vitmnist.config.schema import Config, to_json_values
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError, classify_error
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, select_loader
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.losses import LOSSES
from vitmnist.metrics.epoch_record import Monitor, check_metrics
from vitmnist.metrics.epoch_table import SAVE_S, find_metric
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
from vitmnist.tracking.environment import describe_environment, reset_peak_memory
from vitmnist.tracking.log import log_bottleneck, log_early_stop, log_epoch, log_setup, log_test
from vitmnist.tracking.loggers import LOGGERS, parse_loggers
from vitmnist.tracking.pictures import draw_epoch_images
from vitmnist.tracking.result import Result, record_outcome
from vitmnist.training import setup
from vitmnist.training.execution import Execution
from vitmnist.training.fine_tuning import scale_learning_rates
from vitmnist.training.loop import AfterStep, Predictions, evaluate, train_epoch
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepOptions, resolve_step_options

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Loaders:
    """The loaders of the epochs, and `data.loader` with the selected loader in place of `auto`."""

    train: Loader
    eval: Loader
    config: Mapping[str, Any]


class Trainer:
    """Trains and evaluates as configured, or resumes the run in `folder`.

    `fit` calls the other public methods in the order of their definition. Every rank calls `fit`; rank 0 writes the
    records.

    Args:
        config: the configuration. With `resume`, the run continues from the newest checkpoint in `folder`, if any.
        folder: the folder of the run. It exists, and the caller has locked it. It receives `result.json`, `epochs.csv`,
            checkpoints and the files of the loggers.
        overrides: the command-line overrides, for the record only.
        stop: requests an early stop; listens for signals once training begins.

    Raises:
        ConfigError: the device, a logger or the monitored metric does not exist.
    """

    def __init__(
        self, config: Config, folder: Path, overrides: list[str], stop: StopSignal, world: World = SINGLE_PROCESS
    ) -> None:
        self.config = config = setup.resolve_dataset_options(config)
        self.folder, self.stop, self.world = folder, stop, world
        self.monitor = Monitor(find_metric(config.monitor, "monitor"), config.patience)
        self.logger_configs = parse_loggers(config.logger)
        self.device = choose_device(config.device, world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Graphs are captured and memory is pinned on the current device.
        else:
            keep_freed_memory()
        # Do this before any work on the device: torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product.
        use_deterministic_kernels(config.trainer.deterministic, self.device)
        self.result = Result(
            folder=folder,
            overrides=overrides,
            config=to_json_values(config),
            device=str(self.device),
            distributed={"ranks": world.size} if world.size > 1 else None,
        )

    def fit(self) -> Result:
        """Train, evaluate and record the run.

        Raises:
            ConfigError, DataError, PeerError: the run cannot begin on this or another rank; nothing is recorded.
            TrainingError: training cannot continue; recorded.
            RunInterrupted: the run was asked to stop; recorded and saved.
        """
        config, result, stop, world = self.config, self.result, self.stop, self.world
        deadline = math.inf if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes
        # Restore the signal handlers last: a signal must not kill the process while the outcome is recorded.
        with stop, record_outcome(result, config, stop, world), ExitStack() as loggers:
            # Read the checkpoint first: with one, no initial weights are loaded.
            checkpoint = self.load_checkpoint() if config.resume else None
            weights = None if checkpoint else self.load_initial_weights()
            dataset, sampler = self.build_data()
            step = self.build_step(dataset.train, sampler, weights)
            with self.build_loaders(dataset, sampler, step) as loaders:
                # Capture before NCCL and the loaders start threads: an allocation by another thread breaks the capture.
                step.prepare(loaders.train)
                self.distribute(step)
                # Seed after all set-up, which draws random numbers; a checkpoint restores the generators after that.
                seed_rank(config.seed, world.rank)
                self.record_setup(dataset, step, loaders.train)
                checkpoints = CheckpointManager(config, dataset, step, result, stop, world)
                progress = self._create_progress(sampler)
                if checkpoint:
                    checkpoints.restore(checkpoint, progress)
                del checkpoint, weights  # Free their memory.
                recorder = loggers.enter_context(self.open_recorder(dataset, sampler, step))
                result.setup_s = time.time() - result.began_at - (result.compile_s or 0.0)

                # From here on, a signal stops the run after the current step, so that progress can be saved.
                stop.listen(deadline)
                # A resumed run first completes the epoch in which it stopped.
                while progress.num_batches > 0 or not self.is_done():
                    with self.progress_bar(progress, loaders, checkpoints) as after_step:
                        train_metrics = train_epoch(step, loaders.train, progress, after_step)
                        eval_metrics, predictions = evaluate(
                            step.eval_model, loaders.eval, step.preprocess, after_step, world
                        )
                    recorder.add_epoch(progress, train_metrics, eval_metrics, predictions)
                    self.finish_epoch(recorder, checkpoints, predictions)
                    progress = self._create_progress(sampler)
            loader_config = loaders.config
            del loaders  # Free the samples: the test split may not fit next to them.
            result.stopped_early = len(result.epochs) < config.epochs_to_train
            log_early_stop(result, self.monitor)
            checkpoints.save_final_weights()
            result.test = self.evaluate_on_test(dataset, step, checkpoints, loader_config)
        log_bottleneck(result)
        return result

    def load_checkpoint(self) -> storage.Checkpoint | None:
        """Load the newest checkpoint, if any, and its epochs into `result`."""
        if checkpoint := read_checkpoint_to_resume(self.config, self.folder, self.world):
            self.result.epochs, self.result.resumed = checkpoint["epochs"], True
        return checkpoint

    def load_initial_weights(self) -> Mapping[str, Tensor] | None:
        """Load the weights that `init` or `model.weights` names; None if neither does."""
        config, pretrained = self.config, setup.find_pretrained(self.config)
        if config.init and pretrained:
            raise ConfigError("init and model.weights both name initial weights; set one of them to null")
        if config.init:
            return self.world.broadcast_object(partial(storage.read_initial_weights, config.init))
        if pretrained:
            read = partial(storage.read_initial_weights, str(pretrained.weights), "model.weights")
            return self.world.broadcast_object(pretrained.download if pretrained.weights == "default" else read)
        return None

    def build_data(self) -> tuple[Dataset, EpochSampler]:
        """Read the dataset, and build the sampler for this rank's part of the training batches."""
        config, world = self.config, self.world
        setup.check_config(config)
        setup.check_model(config, self.device)
        dataset = setup.prepare_splits(setup.read_dataset(config, world), config)
        setup.check_eval_split(dataset, config)
        setup.check_same_on_machines(dataset, config, world)
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
        model = setup.build_model(config, train.images.shape[1:], len(train.classes), device, weights)
        preprocess = Preprocess(train, build_augment(config.data)).to(device)
        setup.check_loss(config.loss, train, preprocess.has_mixing)
        loss = LOSSES.build(config.loss, train.labels, train.classes, device)
        setup.check_batch_metrics(len(train.classes))
        optimizer = OPTIMIZERS.build(config.optimizer, model, options.fused)
        _, optimizer_options = OPTIMIZERS.resolve(config.optimizer)
        frozen = scale_learning_rates(optimizer, model, config.lr_scale, optimizer_options.layer_decay)
        get_history = partial(self.monitor.history, self.result.epochs)  # The run appends its epochs.
        schedule = build_schedule(config.schedule, config.epochs, len(sampler), get_history)
        ema = EMA(model, config.ema_decay) if config.ema_decay else None
        execution = Execution(model, preprocess, loss, batch_size, options, frozen)
        step = TrainStep(execution, optimizer, schedule, config.trainer.clip_norm, ema)
        setup.check_batch_norm(step, train.images[:1].to(device), sampler)
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
    def build_loaders(self, dataset: Dataset, sampler: EpochSampler, step: TrainStep) -> Iterator[Loaders]:
        """Build the training and evaluation loaders for the block; with `auto`, rank 0 records the selection."""
        config, train_loader = self.config.data.loader, None
        _, options = LOADERS.resolve(config)
        if isinstance(options, AutoOptions):
            if self.world.is_main:
                selection, train_loader = self._time_loaders(options, dataset.train, sampler, step)
                self.result.auto = asdict(selection)
            config = options.candidate_config(self.world.broadcast_object(lambda: selection.name))
        if train_loader is None:  # Only rank 0 has timed the loaders.
            train_loader = LOADERS.build(config, dataset.train, sampler, self.device)
        with train_loader, self._build_eval_loader(dataset.eval_split, config, step) as eval_loader:
            yield Loaders(train_loader, eval_loader, config)

    def _build_eval_loader(self, split: Split, loader_config: Mapping[str, Any], step: TrainStep) -> Loader:
        """Build a loader that delivers this rank's part of a split in order."""
        # Evaluation stores no activations, so the training microbatch fits. All ranks use the size on rank 0, because
        # the sizes of the ranks can differ by one image.
        world = self.world
        batch_size = world.broadcast_object(lambda: step.execution.microbatch_size) * world.size
        sampler = EpochSampler(len(split), batch_size, shuffle="none", rank=world.rank, world_size=world.size)
        return LOADERS.build(loader_config, split, sampler, self.device)

    def _time_loaders(
        self, options: AutoOptions, train: Split, sampler: EpochSampler, step: TrainStep
    ) -> tuple[LoaderSelection, Loader]:
        """Time the loaders with the training step, and restore its state; return the selection and its loader."""

        def make_candidate(loader: Loader) -> LoaderCandidate:
            step.prepare(loader)  # Compile again for a loader that delivers float32.
            return LoaderCandidate(loader, step.device, step, partial(step.batches, loader))

        log.info("timing %s for a few batches each", ", ".join(options.candidates or ()) or "all loaders")
        with step.preserved_state():
            selection, loader = select_loader(options, train, sampler, step.device, make_candidate)
        log.info("expected time per loader\n%s", selection.format_table())
        return selection, loader

    def distribute(self, step: TrainStep) -> None:
        """Connect the ranks for training."""
        self.world.connect(self.device, self.config.distributed.timeout_s)
        step.distribute(self.world)

    def record_setup(self, dataset: Dataset, step: TrainStep, train_loader: Loader) -> None:
        """Record and log the dataset, the selected loader, the options of the step and the environment."""
        result, world = self.result, self.world
        result.loader = dict(train_loader.resolved_options)
        result.eval_split = dataset.eval_split_name
        result.trainer = asdict(step.execution.options)
        result.compile_s = step.execution.compile_s or None
        result.dataset = {
            "name": dataset.name,
            **{f"{name}_size": len(split) for name, split in dataset.splits.items()},
            "skipped": dataset.skipped,
            "sha256": world.broadcast_object(lambda: dataset.sha256),
            "division": dataset.division,
        }
        result.environment = describe_environment(self.device) if world.is_main else None
        log_setup(self.config, result, dataset, step, train_loader, world)

    def _create_progress(self, sampler: EpochSampler) -> EpochProgress:
        """Create the progress of the next epoch, before its first batch."""
        return EpochProgress(len(self.result.epochs), sampler, self.device, self.config.log.every_steps, self.world)

    @contextmanager
    def open_recorder(self, dataset: Dataset, sampler: EpochSampler, step: TrainStep) -> Iterator[RunRecorder]:
        """Remove records newer than the checkpoint, and open the loggers for the block."""
        folder, result, world, metric = self.folder, self.result, self.world, self.monitor.metric
        reset_peak_memory(self.device)  # The peak excludes the set-up.
        draw_images = partial(draw_epoch_images, dataset, sampler, step.preprocess)
        with ExitStack() as stack:
            loggers = []
            if world.is_main:
                loggers = [stack.enter_context(LOGGERS.build(config, folder, result)) for config in self.logger_configs]
                result.write_config()
                result.write_epochs()  # Drop an incomplete row, and rows newer than the checkpoint.
                # A process that is killed while it writes leaves a temporary file.
                for pattern in ("result.json", f"{storage.FOLDER}/final.safetensors", f"{storage.FOLDER}/.*.tmp"):
                    for path in folder.glob(pattern):
                        path.unlink()
            classes = dataset.train.classes
            yield RunRecorder(self.config, result, world, self.device, metric, classes, loggers, draw_images)

    def is_done(self) -> bool:
        """Whether all epochs are done, or the last `patience` epochs in a row were no better than the best epoch."""
        epochs = self.result.epochs
        return len(epochs) >= self.config.epochs_to_train or self.monitor.is_exhausted(epochs)

    @contextmanager
    def progress_bar(
        self, progress: EpochProgress, loaders: Loaders, checkpoints: CheckpointManager
    ) -> Iterator[AfterStep]:
        """Show a bar for an epoch and its evaluation; yield a callback that advances it and saves checkpoints."""
        with tqdm(
            desc=f"epoch {progress.epoch + 1}",
            total=len(loaders.train) + len(loaders.eval),
            initial=progress.num_batches,
            unit="batch",
            leave=False,
            mininterval=0.5,
            disable=None if self.world.is_main else True,  # None: show the bar only if stderr is a terminal.
        ) as bar:

            def after_step(timer: EpochTimer) -> None:
                bar.update()
                checkpoints.after_step(progress, timer)

            yield after_step

    def finish_epoch(self, recorder: RunRecorder, checkpoints: CheckpointManager, predictions: Predictions) -> None:
        """Write, log and save a completed epoch, which is in `result`.

        Raises:
            DataError: the records or the checkpoint cannot be written. If the records cannot, the run is saved first.
            RunInterrupted: the run was asked to stop, and has been saved.
        """
        result, is_last = self.result, self.is_done()
        # Save the best epoch only with a validation split: selecting it by the test split would bias its accuracy.
        is_best = self.monitor.best_epoch(result.epochs) == len(result.epochs) - 1 and result.eval_split == "validation"
        try:  # Write the records before the checkpoint, because resuming removes records that are newer than it.
            recorder.write_epoch(predictions, is_last)
        except OSError as error:
            checkpoints.after_epoch(is_last, is_best, must_save=True)
            raise DataError(f"cannot write the records: {classify_error(error).message}") from error
        log_epoch(result, self.config.epochs_to_train, self.monitor.metric)
        checkpoints.after_epoch(is_last, is_best)

    def evaluate_on_test(
        self, dataset: Dataset, step: TrainStep, checkpoints: CheckpointManager, loader_config: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Evaluate the best weights on the test split, if the epochs were evaluated on a validation split."""
        if dataset.validation is None or dataset.test is None:
            return None
        checkpoints.load_best_weights()
        with self._build_eval_loader(dataset.test, loader_config, step) as loader:
            metrics, _ = evaluate(step.eval_model, loader, step.preprocess, checkpoints.check_stop, self.world, "test")
        del metrics[SAVE_S.name]  # Nothing is saved in this pass.
        check_metrics(metrics, "test split")
        test = {"weights": "best", **metrics}
        log_test(test, 1 + (self.monitor.best_epoch(self.result.epochs) or 0))
        return test
