"""What an epoch needs, and how it is built from the configuration."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitmnist.config.schema import Config, Shuffle
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import DATASETS, Dataset, build_dataset
from vitmnist.data.datasets.base import Split
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.auto import AutoOptions, Choice, choose
from vitmnist.data.loaders.timing import Trial, resident_loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.rank_sampler import RankSampler
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError, first_line
from vitmnist.models import MODELS
from vitmnist.optim.ema import EMA
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.allocator import freed_memory_kept
from vitmnist.runtime.device import accelerator_of
from vitmnist.runtime.distributed import SingleProcess
from vitmnist.training.fast import Batch, StepConfig, decide, timer
from vitmnist.training.loop import TrainingPass, train_epoch
from vitmnist.training.step import Gradient, Step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSetup:
    """What an epoch needs, built and on its device."""

    dataset: Dataset
    learner: Learner
    step: Step
    train_loader: Loader
    test_loader: Loader
    test_preprocess: Preprocess
    choice: Choice | None


def build_setup(
    config: Config, device: torch.device, stack: ExitStack, world: SingleProcess, decided: StepConfig | None = None
) -> TrainSetup:
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
    global_sampler = EpochSampler(len(dataset.train), config.batch_size, config.seed, data.shuffle, data.drop_last)
    if not len(global_sampler):
        raise ConfigError(
            f"batch_size={config.batch_size} is above the set's {global_sampler.size} images, so data.drop_last=true "
            f"leaves no batch; type batch_size={global_sampler.size} or less, or data.drop_last=false"
        )
    values = data.loader
    _, options = LOADERS.member(values)

    def part(sampler: EpochSampler) -> EpochSampler:
        return sampler if world.size == 1 else RankSampler.of(sampler, world.rank, world.size)

    sampler = part(global_sampler)
    if device.type == "cpu":
        stack.enter_context(freed_memory_kept())
    learner = Learner(config, dataset.train, sampler, device, world, decided)
    # An evaluation needs no gradient: it fits where a piece of a step does, and is as fast as that.
    piece = world.broadcast_object(lambda: learner.gradient.piece)  # the ranks' own may differ by one
    test_sampler = part(EpochSampler(len(dataset.test), piece * world.size, config.seed, Shuffle.none))

    choice = None
    if isinstance(options, AutoOptions):
        learner.compile_ahead()  # its memory is none that a loader must leave
        if world.is_main:
            log.info("timing %s for a few batches each", ", ".join(options.candidates) or "all loaders")
            also = [(dataset.test, test_sampler)]
            choice = choose(options, dataset.train, sampler, device, new_trial=learner.trial, also=also)
            log.info("what to expect of each loader\n%s", choice.table())
        values = world.broadcast_object(lambda: choice.values if choice else None)

    train_loader, test_loader = (
        stack.enter_context(LOADERS.build(values, split, sampler, device))
        for split, sampler in ((dataset.train, sampler), (dataset.test, test_sampler))
    )
    learner.compile_for(train_loader)
    learner.distribute(world)
    return TrainSetup(
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


def read(config: Config, world: SingleProcess) -> Dataset:
    """The data set; on each machine one rank reads, verifies and unpacks it for the others.

    Raises:
        ConfigError, DataError: it cannot be read, or is not the same on each machine.
    """
    with world.first_on_machine() as is_later:
        dataset = build_dataset(config.data.dataset, config.data.root, verify=not is_later)
        if config.data.holdout:
            dataset = dataset.held_out(config.data.holdout)
        sums = dataset.sha256() if world.size > 1 and not world.local_rank else None
    if world.size == 1:
        return dataset
    found = [known for known in world.all_gather_object(sums) if known]
    if differing := [name for name in found[0] if len({known[name] for known in found}) > 1]:
        raise DataError(f"data.root={config.data.root}: {', '.join(differing)} are not the same on each machine")
    train, test = (
        replace(split, sha256=found[0][f"{name}_images"])
        for name, split in (("train", dataset.train), ("test", dataset.test))
    )
    return replace(dataset, train=train, test=test)


class Learner:
    """A model and the way to its gradient, which is compiled once, and the steps that are made of them.

    Args:
        split: what it will be trained on, in the order `order`, which is this rank's.
        world: with whom; rank 0 decides for all.
        decided: a trainer, to be taken in place of deciding anew.

    Raises:
        ConfigError: something of the configuration is unknown or does not fit together.
    """

    def __init__(
        self,
        config: Config,
        split: Split,
        sampler: EpochSampler,
        device: torch.device,
        world: SingleProcess,
        decided: StepConfig | None = None,
    ) -> None:
        self._config, self._split, self._order, self._device = config, split, sampler, device
        self._batch_size = min(sampler.batch_size, sampler.size)
        preprocess = self._preprocess = Preprocess(split, AUGMENTS.build(config.data.augment)).to(device)
        # What a model draws while it learns must not be the same on each rank, whose images are others.
        (own,) = np.random.SeedSequence(config.seed, spawn_key=(world.rank, 4)).generate_state(1, np.uint64)
        self._drawing = int(own) if world.rank else config.seed
        _, *shape = split.images.shape
        # Weights are drawn on the CPU, so that every device starts from the same ones.
        torch.manual_seed(config.seed)
        model = self._model = MODELS.build(config.model, tuple(shape), len(split.classes)).to(device)
        self._drawn = {name: value.clone() for name, value in model.state_dict().items()}
        if decided:
            decided.check(device, world.size)
            self._trainer = decided
        else:
            images = config.epochs * min(len(sampler) * self._batch_size, sampler.size)
            seconds = timer(model, preprocess, self._sample)

            def record() -> dict[str, Any]:
                return decide(config.trainer, device, self._batch_size, images, seconds, world.size).record()

            self._trainer = StepConfig.recorded(world.broadcast_object(record))
        if self._trainer.reasons:
            log.info("what was decided of the trainer\n%s", self._trainer.lines())
        trainer = self._trainer
        self.gradient = Gradient(
            model, preprocess, self._batch_size, trainer.micro_batch, trainer.precision, config.label_smoothing
        )

    def new_step(self) -> Step:
        """A step of a model that has learnt nothing; all steps share the model, and each draws it back."""
        self._model.load_state_dict(self._drawn)
        self._model.zero_grad()
        torch.manual_seed(self._drawing)
        optimizer = OPTIMIZERS.build(self._config.optimizer, self._model, self._trainer.fused)
        schedule = SCHEDULES.build(self._config.schedule, optimizer, self._config.epochs * len(self._order))
        decay = self._config.ema_decay
        return Step(self.gradient, optimizer, schedule, EMA(self._model, decay) if decay else None)

    def trial(self) -> Trial:
        """Trains a new model on what a loader delivers, as `data/loader=auto` wants it."""
        self.gradient.micro_batch = self._trainer.micro_batch  # another loader left less memory, perhaps
        step = self.new_step()
        self.capture(step, resident_loader(self._split, self._order, self._device))

        def seconds(loader: Loader) -> tuple[float, float]:
            current = TrainingPass(0, len(loader), self._device)
            figures = train_epoch(step, loader, current, self._device)
            return figures.seconds, figures.data_wait_s

        return seconds

    def distribute(self, world: SingleProcess) -> None:
        """From now on the ranks add up their gradients, and all begin with the weights of rank 0."""
        self._model.load_state_dict(self._drawn)
        self.gradient.distribute(world)
        self._drawn = {name: value.clone() for name, value in self._model.state_dict().items()}

    def compile_ahead(self) -> None:
        """Compile before there is a loader, if that was decided."""
        self._compile(self._sample())

    def compile_for(self, loader: Loader) -> None:
        """Compile for the batches of a loader, which may be bytes or floats, if that was decided."""
        self.gradient.micro_batch = self._trainer.micro_batch
        if self._trainer.compile:
            with closing(loader.epoch(0)) as batches:
                self._compile((*next(batches), next(self._preprocess.keys(self._order, 0))))

    def capture(self, step: Step, loader: Loader) -> None:
        """Record a step as a graph, if that was decided; after a run was restored, and before it is trained.

        Raises:
            ConfigError: it cannot be recorded, and was asked for by name.
        """
        if not self._trainer.cuda_graph:
            return
        try:
            step.capture(loader, accelerator_of(self._device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = f"the step cannot be recorded: {first_line(error)}"
            if "cuda_graph" not in self._trainer.reasons:
                raise ConfigError(f"trainer.cuda_graph=true: {reason}; type trainer.cuda_graph=false") from error
            self._trainer = self._trainer.because("cuda_graph", False, reason)
            log.info("trainer.cuda_graph=false: %s", reason)

    def record(self) -> dict[str, Any]:
        """How a step is computed, as plain values; pieces may have been halved since it was decided."""
        return {**self._trainer.record(), "micro_batch": self.gradient.micro_batch}

    def _compile(self, batch: Batch) -> None:
        if not self._trainer.compile:
            return
        log.info("compiling the step, which may take a minute")
        reason = self.gradient.compile(*batch)
        if reason:
            self._trainer = self._trainer.because("compile", False, f"could not be compiled: {reason}")
            log.info("trainer.compile=false: could not be compiled: %s", reason)
        else:
            log.info("compiled; that is %.1f s, which count in no epoch", self.gradient.compile_s)

    def _sample(self) -> Batch:
        """A batch that no loader has to deliver."""
        images, labels = (
            part[: self._batch_size].to(self._device) for part in (self._split.images, self._split.labels)
        )
        return images, labels, next(self._preprocess.keys(self._order, 0))
