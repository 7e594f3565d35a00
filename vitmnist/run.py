"""One run, from its configuration to its records."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist import checkpoint, engine
from vitmnist.accelerator import choose_device
from vitmnist.config import Config, Shuffle, typed
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Dataset, Split, build_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Trial, choose
from vitmnist.data.loaders.disk import worker_error
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError, DataError, TrainingError
from vitmnist.folders import claim
from vitmnist.models import MODELS
from vitmnist.optimizer import OPTIMIZERS
from vitmnist.records.environment import describe_environment
from vitmnist.records.hardware import HardwareFigures
from vitmnist.records.progress import progress_bar
from vitmnist.records.result import EpochRecord, Result
from vitmnist.records.tensorboard import TensorBoard
from vitmnist.resume import remember
from vitmnist.saved import Saved, check_same, plain
from vitmnist.schedule import SCHEDULES
from vitmnist.stop import Stop, Stopped
from vitmnist.trainee import Trainee

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
            result.setup_s = time.perf_counter() - started
            with stop.deferred():
                learn(sitting, result, config.epochs)
            advise(result)
        result.status = "completed"
    except BaseException as error:
        refused = isinstance(error, ConfigError | DataError)
        if result.setup_s is None and (refused or config.resume):  # before it began: there is nothing to record
            if not config.resume:
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
    device = choose_device(config.device)
    result.batch_size, result.seed, result.device = config.batch_size, config.seed, str(device)
    stack.enter_context(claim(folder))
    kept = saved_before(config, folder) if config.resume else None
    if kept:
        result.epochs = [EpochRecord(**record) for record in kept["records"]]
    trainee = prepare(config, device, stack)
    hardware = HardwareFigures(device)  # after an automatic choice, whose candidates' memory is not this run's
    if trainee.choice:
        result.choices |= trainee.choice.built
        result.auto = trainee.choice.record()
    result.dataset = describe_dataset(trainee.dataset)
    result.environment = describe_environment(device)
    saved = Saved(folder, config, trainee, result, stop)
    current = restored(saved, kept, folder) if kept else None
    if config.resume:
        remember(result.overrides, folder)
        # They were of a run that had ended, which it has not any more.
        (folder / "result.json").unlink(missing_ok=True)
        if len(result.epochs) < config.epochs:
            (folder / checkpoint.FOLDER / "final.safetensors").unlink(missing_ok=True)
    log.info(
        "%s (%s parameters) on %s, %s loader, %s batches of %d, device=%s is %s",
        result.choices["model"],
        f"{sum(parameter.numel() for parameter in trainee.model.parameters()):,}",
        trainee.dataset.name,
        result.choices["loader"],
        f"{len(trainee.train_loader):,}",
        config.batch_size,
        config.device,
        device,
    )
    board = stack.enter_context(closing(TensorBoard(folder, result.epochs)))
    return Sitting(trainee, saved, board, hardware, device, current)


def saved_before(config: Config, folder: Path) -> dict[str, Any] | None:
    """The checkpoint that a run is resumed from; None where it was stopped before its first.

    Raises:
        ConfigError: the folder is not that of the run, or the configuration is not, or fewer epochs are asked for than
            are done.
        DataError: the checkpoint cannot be read.
    """
    if Path(str(config.resume)).expanduser().resolve() != folder.resolve():
        raise ConfigError(f"resume={config.resume}: its name cannot be typed for Hydra; rename the folder")
    kept = checkpoint.load(folder)
    if kept is None:
        if (folder / "result.json").exists():
            raise ConfigError(f"resume={config.resume}: holds records, but no checkpoint to go on from")
        return None
    try:
        check_same(json.loads(kept["facts"])["config"], plain(config))
        done = len(kept["records"]) + bool(kept["pass"])
    except (KeyError, TypeError, ValueError) as error:
        raise not_ours(folder, error) from error
    if config.epochs < done:
        raise ConfigError(f"epochs={config.epochs}: the run has begun its epoch {done}; type epochs={done} or more")
    return kept


def restored(saved: Saved, kept: dict[str, Any], folder: Path) -> engine.TrainingPass | None:
    """Put the run where its checkpoint left it; raises as `Saved.restore`, and where it is not of our making."""
    try:
        return saved.restore(kept)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise not_ours(folder, error) from error


def not_ours(folder: Path, error: Exception) -> DataError:
    """The error for a checkpoint that is whole, and yet not what this program writes."""
    return DataError(f"{folder / checkpoint.FOLDER}: not a checkpoint of this version of the program: {error}")


def learn(sitting: Sitting, result: Result, epochs: int) -> None:
    """Train and evaluate until `epochs` are done, each recorded and saved.

    Raises:
        TrainingError: training could not go on.
        Stopped: the run was told to stop, and is saved.
    """
    trainee, saved, current = sitting.trainee, sitting.saved, sitting.current
    for epoch in range(len(result.epochs), epochs):
        current = current or engine.TrainingPass(epoch, len(trainee.train_loader), sitting.device)
        record = train_and_evaluate(trainee, current, sitting.device, sitting.hardware, saved)
        current = None
        result.epochs.append(record)
        saved.after_epoch(last=epoch + 1 == epochs)
        sitting.board.epoch(record)
        log_epoch(record, epochs)
        if epoch + 1 < epochs:
            saved.stop_if_due()
    saved.final_weights()
    sitting.board.summary(result)


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


def prepare(config: Config, device: torch.device, stack: ExitStack) -> Trainee:
    """Build everything that a configuration names; the stack closes the loaders.

    Raises:
        ConfigError: something of it is unknown or does not fit together.
        DataError: the data cannot be read.
    """
    data = config.data
    dataset = build_dataset(data.dataset, data.root)
    order = EpochOrder(len(dataset.train), config.batch_size, config.seed, data.shuffle, data.drop_last)
    if not len(order):
        raise ConfigError(
            f"batch_size={config.batch_size} is above the set's {order.size} images, so data.drop_last=true leaves no "
            f"batch; type batch_size={order.size} or less, or data.drop_last=false"
        )
    test_order = EpochOrder(len(dataset.test), config.batch_size, config.seed, Shuffle.none)
    preprocess = Preprocess(dataset.train, AUGMENTS.build(data.augment)).to(device)

    def learner() -> tuple[nn.Module, Optimizer, LRScheduler]:
        # Weights are drawn on the CPU, so that every device starts from the same ones.
        torch.manual_seed(config.seed)
        _, *shape = dataset.train.images.shape
        model = MODELS.build(config.model, tuple(shape), len(dataset.train.classes)).to(device)
        optimizer = OPTIMIZERS.build(config.optimizer, model.parameters())
        return model, optimizer, SCHEDULES.build(config.schedule, optimizer, config.epochs * len(order))

    def trial() -> Trial:
        model, optimizer, schedule = learner()

        def seconds(loader: Loader) -> tuple[float, float]:
            current = engine.TrainingPass(0, len(loader), device)
            figures = engine.train_epoch(
                model, loader, current, preprocess, optimizer, schedule, device, advance=lambda: None
            )
            return figures.seconds, figures.data_wait_s

        return seconds

    choice = None
    values = data.loader
    _, options = LOADERS.member(values)
    if isinstance(options, AutoOptions):
        log.info("timing %s for a few batches each", ", ".join(options.candidates) or "all loaders")
        also = [(dataset.test, test_order)]
        choice = choose(options, dataset.train, order, device, new_trial=trial, also=also)
        log.info("what to expect of each loader\n%s", choice.table())
        values = choice.values

    def loader(split: Split, order: EpochOrder) -> Loader:
        return stack.enter_context(LOADERS.build(values, split, order, device))

    model, optimizer, schedule = learner()
    return Trainee(
        dataset=dataset,
        model=model,
        train_loader=loader(dataset.train, order),
        test_loader=loader(dataset.test, test_order),
        train_preprocess=preprocess,
        test_preprocess=Preprocess(dataset.train).to(device),
        optimizer=optimizer,
        schedule=schedule,
        choice=choice,
    )


def train_and_evaluate(
    trainee: Trainee, current: engine.TrainingPass, device: torch.device, hardware: HardwareFigures, saved: Saved
) -> EpochRecord:
    """One epoch of training, or what is left of it, and the evaluation after it.

    Raises:
        TrainingError: a loss was not finite.
        Stopped: the run was told to stop, and is saved.
    """
    started = time.time()
    epoch = current.epoch

    def advance() -> None:
        bar.update()
        saved.after_step(current)

    try:
        with progress_bar(f"epoch {epoch + 1} train", len(trainee.train_loader), current.tally.steps) as bar:
            train = engine.train_epoch(
                trainee.model,
                trainee.train_loader,
                current,
                trainee.train_preprocess,
                trainee.optimizer,
                trainee.schedule,
                device,
                advance,
            )
        with progress_bar(f"epoch {epoch + 1} test", len(trainee.test_loader)) as bar:
            val = engine.evaluate(trainee.model, trainee.test_loader, trainee.test_preprocess, device, advance)
        if not math.isfinite(val.loss):
            rate = trainee.optimizer.param_groups[0]["lr"]
            raise TrainingError(
                f"the validation loss is {val.loss} after epoch {epoch + 1}, step {len(trainee.train_loader)}, "
                f"at learning rate {rate:g}; try a smaller optimizer.lr"
            )
    except TrainingError as error:
        raise TrainingError(f"{error}{saved.good()}") from error
    return EpochRecord.of(
        epoch, train, val, hardware.host_peak_mib(), hardware.gpu_peak_mib(), hardware.gpu_util_pct(started)
    )


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
