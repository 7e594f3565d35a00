"""What an epoch needs, and how it is built from the configuration."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist import engine
from vitmnist.config import Config, Shuffle
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Dataset, Split, build_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Choice, Trial, choose
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError
from vitmnist.models import MODELS
from vitmnist.optimizer import OPTIMIZERS
from vitmnist.schedule import SCHEDULES

log = logging.getLogger(__name__)


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
    if data.holdout:
        dataset = dataset.held_out(data.holdout)
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
