"""What learns, built from the configuration: a model, how its gradient is computed, and steps that begin anew."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import numpy as np
import torch

from vitmnist import engine
from vitmnist.accelerator import accelerator_of
from vitmnist.config import Config
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Split
from vitmnist.data.loaders import Loader
from vitmnist.data.loaders.timing import Resident, Trial
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError, first_line
from vitmnist.models import MODELS
from vitmnist.optimizer import OPTIMIZERS
from vitmnist.schedule import SCHEDULES
from vitmnist.training import Average, Gradient, Step
from vitmnist.training.trainer import Batch, Trainer, decide, timer
from vitmnist.world import World

log = logging.getLogger(__name__)


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
        order: EpochOrder,
        device: torch.device,
        world: World,
        decided: Trainer | None = None,
    ) -> None:
        self._config, self._split, self._order, self._device = config, split, order, device
        self._batch_size = min(order.batch_size, order.size)
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
            images = config.epochs * min(len(order) * self._batch_size, order.size)
            seconds = timer(model, preprocess, self._sample)

            def record() -> dict[str, Any]:
                return decide(config.trainer, device, self._batch_size, images, seconds, world.size).record()

            self._trainer = Trainer.recorded(world.share(record))
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
        return Step(self.gradient, optimizer, schedule, Average(self._model, decay) if decay else None)

    def trial(self) -> Trial:
        """Trains a new model on what a loader delivers, as `data/loader=auto` wants it."""
        self.gradient.micro_batch = self._trainer.micro_batch  # another loader left less memory, perhaps
        step = self.new_step()
        self.capture(step, Resident(self._split, self._order, self._device))

        def seconds(loader: Loader) -> tuple[float, float]:
            current = engine.TrainingPass(0, len(loader), self._device)
            figures = engine.train_epoch(step, loader, current, self._device)
            return figures.seconds, figures.data_wait_s

        return seconds

    def distribute(self, world: World) -> None:
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
