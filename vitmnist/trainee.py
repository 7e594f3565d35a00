"""What an epoch needs, and how it is built from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from vitmnist.config import Config, Shuffle
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import DATASETS, Dataset, build_dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Choice, choose
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.reading import Reading, read_as
from vitmnist.data.shares import RankOrder
from vitmnist.errors import ConfigError, DataError
from vitmnist.learner import Learner
from vitmnist.memory import freed_memory_kept
from vitmnist.models import MODELS
from vitmnist.optimizer import OPTIMIZERS
from vitmnist.schedule import SCHEDULES
from vitmnist.training import Step
from vitmnist.training.trainer import Trainer
from vitmnist.world import World

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


def prepare(
    config: Config, device: torch.device, stack: ExitStack, world: World, decided: Trainer | None = None
) -> Trainee:
    """Build everything that a configuration names; the stack closes the loaders, and gives kept memory back.

    Args:
        world: with whom it is trained; each rank has its part of every batch.
        decided: a trainer, to be taken in place of deciding anew.

    Raises:
        ConfigError: something of it is unknown or does not fit together.
        DataError: the data cannot be read.
    """
    data = config.data
    check(config)
    dataset = read(config, world)
    together = EpochOrder(len(dataset.train), config.batch_size, config.seed, data.shuffle, data.drop_last)
    if not len(together):
        raise ConfigError(
            f"batch_size={config.batch_size} is above the set's {together.size} images, so data.drop_last=true leaves "
            f"no batch; type batch_size={together.size} or less, or data.drop_last=false"
        )
    values = data.loader
    _, options = LOADERS.member(values)

    def part(order: EpochOrder) -> EpochOrder:
        return order if world.size == 1 else RankOrder.of(order, world.rank, world.size)

    order = part(together)
    if device.type == "cpu":
        stack.enter_context(freed_memory_kept())
    learner = Learner(config, dataset.train, order, device, world, decided)
    # An evaluation needs no gradient: it fits where a piece of a step does, and is as fast as that.
    piece = world.share(lambda: learner.gradient.piece)  # the ranks' own may differ by one
    test_order = part(EpochOrder(len(dataset.test), piece * world.size, config.seed, Shuffle.none))

    choice = None
    if isinstance(options, AutoOptions):
        learner.compile_ahead()  # its memory is none that a loader must leave
        if world.main:
            log.info("timing %s for a few batches each", ", ".join(options.candidates) or "all loaders")
            also = [(dataset.test, test_order)]
            choice = choose(options, dataset.train, order, device, new_trial=learner.trial, also=also)
            log.info("what to expect of each loader\n%s", choice.table())
        values = world.share(lambda: choice.values if choice else None)

    with reading_in_turn(world):
        train_loader, test_loader = (
            stack.enter_context(LOADERS.build(values, split, order, device))
            for split, order in ((dataset.train, order), (dataset.test, test_order))
        )
    learner.compile_for(train_loader)
    learner.distribute(world)
    return Trainee(
        dataset=dataset,
        learner=learner,
        step=learner.new_step(),
        train_loader=train_loader,
        test_loader=test_loader,
        test_preprocess=Preprocess(dataset.train).to(device),
        choice=choice,
    )


def check(config: Config) -> None:
    """Refuse what the configuration alone shows to be wrong, before data are read or decoded.

    Raises:
        ConfigError: an unknown name or option, or a model or augmentation that does not fit images of the configured
            size.
    """
    data = config.data
    _, options = DATASETS.member(data.dataset)
    for registry, values in ((LOADERS, data.loader), (OPTIMIZERS, config.optimizer), (SCHEDULES, config.schedule)):
        registry.member(values)
    augment = AUGMENTS.build(data.augment)
    MODELS.member(config.model)
    if shape := getattr(options, "shape", None):
        MODELS.build(config.model, shape, 2)  # the number of classes is not known yet
        if augment:
            augment.check(*shape[1:])


def read(config: Config, world: World) -> Dataset:
    """The data set; on each machine one rank reads, verifies and unpacks it for the others.

    Raises:
        ConfigError, DataError: it cannot be read, or is not the same on each machine.
    """
    with reading_in_turn(world):
        dataset = build_dataset(config.data.dataset, config.data.root)
        if config.data.holdout:
            dataset = dataset.held_out(config.data.holdout)
        sums = dataset.sha256() if world.size > 1 and not world.local_rank else None
    if world.size == 1:
        return dataset
    found = [known for known in world.gather(sums) if known]
    if differing := [name for name in found[0] if len({known[name] for known in found}) > 1]:
        raise DataError(f"data.root={config.data.root}: {', '.join(differing)} are not the same on each machine")
    train, test = (
        replace(split, sha256=found[0][f"{name}_images"])
        for name, split in (("train", dataset.train), ("test", dataset.test))
    )
    return replace(dataset, train=train, test=test)


@contextmanager
def reading_in_turn(world: World) -> Iterator[None]:
    """Let one rank of each machine do what reads files before the others of it, which need not verify them again."""
    with world.first_on_machine() as later:
        alone = Reading.ALONE if world.machine_size == 1 else Reading.FIRST
        with read_as(Reading.LATER if later else alone):
            yield
