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
from vitmnist.config import Config, Shuffle, typed
from vitmnist.data.dataset import Dataset, Split, load_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import AUGMENTS, Preprocess
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
            hardware = HardwareFigures(device)
            trainee = prepare(config, device, stack)
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
        result.status = "completed"
    except (ConfigError, DataError):
        raise  # refused before it began: there is nothing to record
    except BaseException as error:
        result.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        result.error = str(error) or type(error).__name__
        result.write(folder)
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
    train_preprocess: nn.Module
    test_preprocess: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler


def prepare(config: Config, device: torch.device, stack: ExitStack) -> Trainee:
    """Build everything that a configuration names; the stack closes the loaders.

    Raises:
        ConfigError: something of it is unknown or does not fit together.
        DataError: the data cannot be read.
    """
    data = config.data
    dataset = load_dataset(data.dataset, data.root)

    def loader(split: Split, shuffle: Shuffle, drop_last: bool) -> Loader:
        order = EpochOrder(len(split), config.batch_size, config.seed, shuffle, drop_last)
        return stack.enter_context(LOADERS.build(data.loader, split, order, device))

    train_loader = loader(dataset.train, data.shuffle, data.drop_last)
    # Weights are drawn on the CPU, so that every device starts from the same ones.
    torch.manual_seed(config.seed)
    _, *shape = dataset.train.images.shape
    model = MODELS.build(config.model, tuple(shape), len(dataset.train.classes)).to(device)
    optimizer = OPTIMIZERS.build(config.optimizer, model.parameters())
    return Trainee(
        dataset=dataset,
        model=model,
        train_loader=train_loader,
        test_loader=loader(dataset.test, Shuffle.none, drop_last=False),
        train_preprocess=Preprocess(dataset.train, AUGMENTS.build(data.augment)).to(device),
        test_preprocess=Preprocess(dataset.test).to(device),
        optimizer=optimizer,
        schedule=SCHEDULES.build(config.schedule, optimizer, config.epochs * len(train_loader)),
    )


def choose_device(name: str) -> torch.device:
    """The device that `device=` names; `auto` is the first CUDA device, or the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device={name}: not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, …")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name}: torch sees {count or 'no'} CUDA device{'' if count == 1 else 's'} here; "
            "type device=auto or device=cpu"
        )
    return device


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


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Name, sizes and checksums, for the record."""
    return {
        "name": dataset.name,
        "train_size": len(dataset.train),
        "test_size": len(dataset.test),
        "sha256": dataset.sha256(),
    }
