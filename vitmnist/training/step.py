"""A training step, from a batch to changed weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.accelerator import Accelerator
from vitmnist.data.loaders import Loader
from vitmnist.training.average import Average
from vitmnist.training.captured import CapturedStep
from vitmnist.training.gradient import Gradient


class Step:
    """Gradient, optimizer, average and schedule, each moved on once a batch.

    Args:
        average: of the weights; None keeps none.
    """

    def __init__(
        self, gradient: Gradient, optimizer: Optimizer, schedule: LRScheduler, average: Average | None = None
    ) -> None:
        self.gradient, self.optimizer, self.schedule, self.average = gradient, optimizer, schedule, average
        self._captured: CapturedStep | None = None

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.gradient.model

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and kept: the averaged one, where there is an average."""
        return self.average.model if self.average else self.model

    @property
    def rate(self) -> float:
        """The learning rate of the step that comes now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def batches(self, loader: Loader, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        """What a call takes of each batch of an epoch: images and labels, or indices, where it gathers them itself."""
        return self._captured.batches(loader, epoch, start) if self._captured else loader.epoch(epoch, start)

    def __call__(
        self,
        batch: tuple[Tensor, ...],
        keys: Tensor | None,
        watch: Callable[[nn.Module], object] = lambda model: None,
        size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take a step; the batch's mean loss and how many of its images were classified rightly, on the device.

        Args:
            batch: as `batches` gives it.
            keys: int64 `[B]`, what the batch's augmentation is drawn from; None if it has none.
            watch: is given the model when it has its gradient.
            size: images of the whole batch, where this is one rank's part of it; the loss is that part's share.
        """
        if self._captured:
            figures = self._captured(batch, keys)
            watch(self.model)
        else:
            images, labels = batch
            figures = self.gradient(images, labels, keys, size)
            watch(self.model)  # some optimizers write into the gradient
            self.optimizer.step()
            if self.average:
                self.average.take_in(self.average.next_weight())
        self.schedule.step()
        return figures

    def capture(self, loader: Loader, accelerator: Accelerator) -> None:
        """From now on replay the step as one graph of the device's; weights and state stay as they are.

        The graph would not see a state that is loaded into the optimizer later: restore a run first. The seconds that
        it takes are added to the gradient's `compile_s`.

        Raises:
            RuntimeError: the model does something that cannot be recorded; the step goes on as before.
        """
        started, before, padding = time.perf_counter(), self.gradient.compile_s, self.gradient.padding
        self.model.train()
        self.gradient.padding = True
        keys = next(self.gradient.preprocess.keys(loader.order, 0))
        with closing(loader.epoch(0)) as batches:
            batch = next(batches)
        parts = (self.optimizer, self.average, batch, keys, loader.resident, accelerator)
        try:
            with self.gradient.random_state_kept():
                self._captured = self.gradient.within_memory(lambda: CapturedStep(self.gradient, *parts))
        except RuntimeError:
            self.gradient.padding = padding
            raise
        self.gradient.compile_s = before + time.perf_counter() - started
