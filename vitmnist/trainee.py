"""What an epoch needs, and how it is built from the configuration."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from vitmnist.config import Config, Shuffle
from vitmnist.data.datasets import Dataset, Split, build_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Choice, choose
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError
from vitmnist.learner import Learner
from vitmnist.memory import freed_memory_kept
from vitmnist.training import Step
from vitmnist.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainee:
    """What an epoch needs, built and on its device."""

    dataset: Dataset
    learner: Learner
    step: Step
    train_loader: Loader
    test_loader: Loader
    test_preprocess: Preprocess
    choice: Choice | None


def prepare(config: Config, device: torch.device, stack: ExitStack, decided: Trainer | None = None) -> Trainee:
    """Build everything that a configuration names; the stack closes the loaders, and gives kept memory back.

    Args:
        decided: a trainer, to be taken in place of deciding anew.

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
    if device.type == "cpu":
        stack.enter_context(freed_memory_kept())
    learner = Learner(config, dataset.train, order, device, decided)
    # An evaluation needs no gradient: it fits where a piece of a step does, and is as fast as that.
    test_order = EpochOrder(len(dataset.test), learner.gradient.piece, config.seed, Shuffle.none)

    choice = None
    values = data.loader
    _, options = LOADERS.member(values)
    if isinstance(options, AutoOptions):
        learner.compile_ahead()  # its memory is none that a loader must leave
        log.info("timing %s for a few batches each", ", ".join(options.candidates) or "all loaders")
        also = [(dataset.test, test_order)]
        choice = choose(options, dataset.train, order, device, new_trial=learner.trial, also=also)
        log.info("what to expect of each loader\n%s", choice.table())
        values = choice.values

    def loader(split: Split, order: EpochOrder) -> Loader:
        return stack.enter_context(LOADERS.build(values, split, order, device))

    train_loader = loader(dataset.train, order)
    learner.compile_for(train_loader)
    return Trainee(
        dataset=dataset,
        learner=learner,
        step=learner.new_step(),
        train_loader=train_loader,
        test_loader=loader(dataset.test, test_order),
        test_preprocess=Preprocess(dataset.train).to(device),
        choice=choice,
    )
