"""One run, from its configuration to its records."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from vitmnist import checkpoint, engine
from vitmnist.accelerator import choose_device
from vitmnist.config import Config, plain, typed
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders.disk import worker_error
from vitmnist.errors import ConfigError, DataError, TrainingError
from vitmnist.folders import ClaimedError, claim
from vitmnist.profiler import profiled
from vitmnist.records.environment import describe_environment
from vitmnist.records.hardware import HardwareFigures
from vitmnist.records.progress import progress_bar
from vitmnist.records.result import EpochRecord, Result
from vitmnist.records.tensorboard import TensorBoard
from vitmnist.resume import remember
from vitmnist.saved import Saved, saved_before
from vitmnist.stop import Stop, Stopped
from vitmnist.trainee import Trainee, prepare

log = logging.getLogger(__name__)

NOTICEABLE = 10.0  # percent of an epoch


def run(composed: DictConfig, folder: Path, overrides: list[str], stop: Stop) -> Result:
    """Train and evaluate as configured, or go on with what `folder` holds, and leave the records there.

    Args:
        composed: the configuration, as `conf/` composes it.
        folder: an existing folder; gets `result.json`, a TensorBoard event file and checkpoints.
        overrides: what was typed, for the record.
        stop: tells when to stop before the end.

    Raises:
        ConfigError: the configuration cannot be used; nothing is recorded.
        DataError: the data cannot be used; nothing is recorded.
        TrainingError: training could not go on; recorded.
        Stopped: the run was told to stop; recorded and saved.
    """
    started = time.perf_counter()
    result = Result(overrides=overrides, choices=choices_of(composed))
    config = typed(Config, composed)
    result.config = plain(config)
    try:
        stop.after_minutes(config.max_minutes)
        with ExitStack() as stack:
            sitting = begin(config, folder, result, stop, stack)
            result.setup_s = time.perf_counter() - started - (result.compile_s or 0.0)
            with stop.deferred():
                learn(sitting, result, config, folder, stop)
            advise(result)
        result.status = "completed"
    except BaseException as error:
        refused = isinstance(error, ConfigError | DataError)
        if result.setup_s is None and (refused or config.resume):  # before it began: there is nothing to record
            if not config.resume and not isinstance(error, ClaimedError):
                (folder / ".lock").unlink(missing_ok=True)
            raise
        if stop.due and worker_error(error):
            error = stop.due  # whoever stopped the run stopped its workers too
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        result.status = "interrupted" if stopped else "failed"
        result.error = explained(error, config.batch_size)
        with stop.deferred():
            write_result(result, folder)
        if stopped:
            raise error from None
        if refused or is_out_of_memory(error) or worker_error(error) or isinstance(error, OSError):
            # Data that went bad under the run, a disk that is full, a worker that was killed: no fault of the program.
            raise TrainingError(result.error) from error
        raise
    with stop.deferred():
        write_result(result, folder)
    return result


@dataclass
class Sitting:
    """A run that has been set up, from its beginning or from where it was saved."""

    trainee: Trainee
    saved: Saved
    board: TensorBoard
    hardware: HardwareFigures
    device: torch.device
    current: engine.TrainingPass | None
    """The epoch that was under way when it was saved."""


def begin(config: Config, folder: Path, result: Result, stop: Stop, stack: ExitStack) -> Sitting:
    """Set a run up, and note in `result` what is known of it; the stack closes what must be closed.

    Raises:
        ConfigError: something of the configuration is unknown, does not fit together, or may not change on resuming.
        DataError: the data or the checkpoints cannot be read.
    """
    gc.collect()  # a compiled step of the job before is a cycle, which would take this one's memory
    device = choose_device(config.device)
    result.batch_size, result.seed, result.device = config.batch_size, config.seed, str(device)
    stack.enter_context(claim(folder))
    kept = saved_before(config, folder) if config.resume else None
    if kept:
        result.epochs = kept["records"]
    # What was decided for another kind of device, or from other wishes, is decided anew.
    same = kept and kept["typed"] == (device.type, plain(config)["trainer"])
    trainee = prepare(config, device, stack, kept["trainer"] if kept and same else None)
    hardware = HardwareFigures(device)  # after an automatic choice, whose candidates' memory is not this run's
    if trainee.choice:
        result.choices |= trainee.choice.built
        result.auto = trainee.choice.record()
    result.dataset = describe_dataset(trainee.dataset)
    result.environment = describe_environment(device)
    saved = Saved(folder, config, trainee, result, stop)
    current = saved.restore(kept) if kept else None
    trainee.learner.capture(trainee.step, trainee.train_loader)
    saved.note_step()
    if config.resume:
        remember(result.overrides, folder)
        # They were of a run that had ended, which it has not any more.
        (folder / "result.json").unlink(missing_ok=True)
        if len(result.epochs) < config.epochs:
            (folder / checkpoint.FOLDER / "final.safetensors").unlink(missing_ok=True)
    log.info(
        "%s (%s parameters) on %s, %s loader, %s batches of %d, device=%s is %s",
        result.choices["model"],
        f"{sum(parameter.numel() for parameter in trainee.step.model.parameters()):,}",
        trainee.dataset.name,
        result.choices["loader"],
        f"{len(trainee.train_loader):,}",
        config.batch_size,
        config.device,
        device,
    )
    board = stack.enter_context(TensorBoard(folder, result))
    return Sitting(trainee, saved, board, hardware, device, current)


def learn(sitting: Sitting, result: Result, config: Config, folder: Path, stop: Stop) -> None:
    """Train and evaluate until all epochs are done, each recorded and saved.

    Raises:
        TrainingError: training could not go on.
        Stopped: the run was told to stop, and is saved.
    """
    trainee, saved, device, current = sitting.trainee, sitting.saved, sitting.device, sitting.current
    steps, options = len(trainee.train_loader), config.tensorboard
    first = len(result.epochs)
    for epoch in range(first, config.epochs):
        last = epoch + 1 == config.epochs
        current = current or engine.TrainingPass(epoch, steps, device, options.every_steps)
        profiling = config.profile and epoch == first
        recording = profiled(folder, steps - current.tally.steps, device) if profiling else nullcontext()
        record, predictions = train_and_evaluate(sitting, current, recording)
        current = None
        saved.note_step()
        result.epochs.append(record)
        # Before the checkpoint: what is drawn of an epoch that it does not know is left out on resuming.
        if options.images_every_epochs and (last or (epoch + 1) % options.images_every_epochs == 0):
            sitting.board.pictures(trainee, predictions, epoch)
        saved.after_epoch(last)
        sitting.board.epoch(record)
        log_epoch(record, config.epochs)
        if not last:
            stop.check()
    saved.final_weights()


def write_result(result: Result, folder: Path) -> None:
    """Write `result.json`.

    Raises:
        TrainingError: it cannot be written; says what it would have said.
    """
    try:
        result.write(folder)
    except OSError as error:
        reason = f"; the run {result.status}: {result.error}" if result.error else ""
        raise TrainingError(f"cannot write {folder / 'result.json'}: {error.strerror}{reason}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory left for a tensor."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explained(error: BaseException, batch_size: int) -> str:
    """An error's message, and what to do about it where the message alone does not say."""
    message = str(worker_error(error) or error) or type(error).__name__
    if is_out_of_memory(error):
        return (
            f"out of memory: {message.splitlines()[0]}; try a batch_size below {batch_size}, a smaller model, or "
            "data/loader=ram, which keeps the set off the GPU"
        )
    return message


def choices_of(composed: DictConfig) -> dict[str, str]:
    """The registered name that each config group came down to: `{"model": "vit", "loader": "ram", …}`."""
    places = ("model", "data.dataset", "data.loader", "data.loader.base", "data.augment", "optimizer", "schedule")
    plain = OmegaConf.to_container(composed)
    names = {}
    for place in places:
        node: Any = plain
        for key in (*place.split("."), "name"):  # a refused configuration may lack any of it
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None:
            names[place.removeprefix("data.")] = str(node)
    return names


def train_and_evaluate(
    sitting: Sitting, current: engine.TrainingPass, recording: AbstractContextManager[Callable[[], None] | None]
) -> tuple[EpochRecord, engine.Predictions]:
    """One epoch of training, or what is left of it, and the evaluation after it.

    Args:
        recording: entered for the training; what it yields, if anything, is called after each step.

    Raises:
        TrainingError: a loss was not finite.
        Stopped: the run was told to stop, and is saved.
    """
    trainee, saved, device, hardware = sitting.trainee, sitting.saved, sitting.device, sitting.hardware
    started = time.time()
    epoch, steps = current.epoch, len(trainee.train_loader)

    def advance() -> None:
        bar.update()
        if record_step:
            record_step()
        saved.after_step(current)

    try:
        with progress_bar(f"epoch {epoch + 1} train", steps, current.tally.steps) as bar, recording as record_step:
            train = engine.train_epoch(trainee.step, trainee.train_loader, current, device, advance)
        record_step = None
        with progress_bar(f"epoch {epoch + 1} test", len(trainee.test_loader)) as bar:
            val, predictions = engine.evaluate(
                trainee.step.evaluated, trainee.test_loader, trainee.test_preprocess, device, advance
            )
        if not math.isfinite(val.loss):
            rate = trainee.step.rate
            raise TrainingError(
                f"the validation loss is {val.loss} after epoch {epoch + 1}, step {steps}, at learning rate {rate:g}; "
                "try a smaller optimizer.lr"
            )
    except TrainingError as error:
        raise TrainingError(f"{error}{saved.good()}") from error
    memory = hardware.host_peak_mib(), hardware.gpu_peak_mib()
    return EpochRecord.of(epoch, train, val, *memory, hardware.gpu_util_pct(started), current.watched()), predictions


def log_epoch(record: EpochRecord, epochs: int) -> None:
    """A line for people; epochs count from 1 there and from 0 in the records."""
    log.info(
        "epoch %d/%d  train loss %.4f acc %.2f%%  val loss %.4f acc %.2f%%  "
        "%.2f s, %.1f%% of it waiting for data, %s images/s",
        record.epoch + 1,
        epochs,
        record.train_loss,
        record.train_acc,
        record.val_loss,
        record.val_acc,
        record.epoch_s,
        record.data_wait_pct,
        f"{record.images_per_s:,.0f}",
    )


def advise(result: Result) -> None:
    """Say so if another loader could make the run noticeably shorter."""
    waiting = result.summary()["data_wait_pct"] or 0.0
    if waiting > NOTICEABLE and result.auto is None:
        log.info("%.0f%% of an epoch was spent waiting for data; data/loader=auto measures which loader helps", waiting)


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Name, sizes and checksums, for the record."""
    return {
        "name": dataset.name,
        "train_size": len(dataset.train),
        "test_size": len(dataset.test),
        "skipped": dataset.skipped,
        "sha256": dataset.sha256(),
    }
