"""One run, from its configuration to its records."""

from __future__ import annotations

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

from vitmnist import engine
from vitmnist.accelerator import choose_device
from vitmnist.config import Config, Shuffle, typed
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Dataset, Split, build_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Choice, Trial, choose
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError, DataError, TrainingError
from vitmnist.models import MODELS
from vitmnist.optimizer import OPTIMIZERS
from vitmnist.records.environment import describe_environment
from vitmnist.records.hardware import HardwareFigures
from vitmnist.records.progress import progress_bar
from vitmnist.records.result import EpochRecord, Result
from vitmnist.records.tensorboard import TensorBoard
from vitmnist.schedule import SCHEDULES

log = logging.getLogger(__name__)

NOTICEABLE = 10.0  # percent of an epoch


def run(composed: DictConfig, folder: Path, overrides: list[str]) -> Result:
    """Train and evaluate as configured, and leave the records in `folder`.

    Args:
        composed: the configuration, as `conf/` composes it.
        folder: an existing folder; gets `result.json` and a TensorBoard event file.
        overrides: what was typed, for the record.

    Raises:
        ConfigError: the configuration cannot be used; nothing is recorded.
        DataError: the data cannot be used; nothing is recorded.
        TrainingError: training could not go on; recorded.
    """
    started = time.perf_counter()
    result = Result(overrides=overrides, choices=choices_of(composed))
    try:
        config = typed(Config, composed)
        device = choose_device(config.device)
        result.batch_size, result.seed, result.device = config.batch_size, config.seed, str(device)
        with ExitStack() as stack:
            trainee = prepare(config, device, stack)
            hardware = HardwareFigures(device)  # after an automatic choice, whose candidates' memory is not this run's
            if trainee.choice:
                result.choices |= trainee.choice.built
                result.auto = trainee.choice.record()
            result.dataset = describe_dataset(trainee.dataset)
            result.environment = describe_environment(device)
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
            board = stack.enter_context(closing(TensorBoard(folder)))
            result.setup_s = time.perf_counter() - started
            for epoch in range(config.epochs):
                record = train_and_evaluate(trainee, epoch, device, hardware)
                result.epochs.append(record)
                board.epoch(record)
                log_epoch(record, config.epochs)
            board.summary(result)
            advise(result)
        result.status = "completed"
    except BaseException as error:
        refused = isinstance(error, ConfigError | DataError)
        if refused and result.setup_s is None:
            raise  # before it began: there is nothing to record
        result.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        result.error = str(error) or type(error).__name__
        result.write(folder)
        if refused:  # by data that went bad under the run
            raise TrainingError(result.error) from error
        raise
    result.write(folder)
    return result


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


@dataclass(frozen=True)
class Trainee:
    """What an epoch needs, built and on its device."""

    dataset: Dataset
    model: nn.Module
    train_loader: Loader
    test_loader: Loader
    train_preprocess: Preprocess
    test_preprocess: Preprocess
    optimizer: Optimizer
    schedule: LRScheduler
    choice: Choice | None


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
            figures = engine.train_epoch(
                model, loader, 0, preprocess, optimizer, schedule, device, advance=lambda: None
            )
            return figures.seconds, figures.data_wait_s

        return seconds

    choice = None
    values = data.loader
    _, options = LOADERS.member(values)
    if isinstance(options, AutoOptions):
        log.info("timing %s for a few batches each", ", ".join(options.candidates) or "all loaders")
        choice = choose(options, dataset.train, order, device, new_trial=trial)
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


def train_and_evaluate(trainee: Trainee, epoch: int, device: torch.device, hardware: HardwareFigures) -> EpochRecord:
    """One epoch of training and the evaluation after it.

    Raises:
        TrainingError: a loss was not finite.
    """
    started = time.time()
    with progress_bar(f"epoch {epoch + 1} train", len(trainee.train_loader)) as bar:
        train = engine.train_epoch(
            trainee.model,
            trainee.train_loader,
            epoch,
            trainee.train_preprocess,
            trainee.optimizer,
            trainee.schedule,
            device,
            bar.update,
        )
    with progress_bar(f"epoch {epoch + 1} test", len(trainee.test_loader)) as bar:
        val = engine.evaluate(trainee.model, trainee.test_loader, trainee.test_preprocess, device, bar.update)
    if not math.isfinite(val.loss):
        rate = trainee.optimizer.param_groups[0]["lr"]
        raise TrainingError(
            f"the validation loss is {val.loss} after epoch {epoch + 1}, step {len(trainee.train_loader)}, "
            f"at learning rate {rate:g}; try a smaller optimizer.lr"
        )
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
