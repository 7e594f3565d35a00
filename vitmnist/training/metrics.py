"""Figures of a pass over a split: loss, accuracy, times, predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import TrainingError
from vitmnist.runtime.distributed import ALONE, SingleProcess


@dataclass(frozen=True)
class PassFigures:
    """One pass over a split. Times in seconds; `loss` is the mean per image, `accuracy` a percentage.

    Where several processes train together, images, loss and accuracy are those of all, times those of this one.
    `seconds` is the whole pass without `save_s`: `data_wait_s`, `compute_s` and everything else.
    """

    images: int
    loss: float
    accuracy: float
    seconds: float
    data_wait_s: float
    compute_s: float
    save_s: float


@dataclass(frozen=True)
class StepFigures:
    """A training step: its number from the first of the run on, its mean loss, its learning rate, and the norm of all
    gradients together; None where the norm was not finite."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None


@dataclass(frozen=True)
class Predictions:
    """What a model took the images of a split for, in its order, on the device.

    Args:
        labels: int64 `[N]`, the most likely class.
        confidence: float `[N]`, its probability by the model.
    """

    labels: Tensor
    confidence: Tensor

    def confusion_matrix(self, actual: Tensor, classes: int) -> Tensor:
        """How many images of each class (rows) were taken for each class (columns): int64 `[classes, classes]`, CPU.

        Args:
            actual: the true classes, int64 `[N]` on any device.
        """
        pairs = actual.to(self.labels.device) * classes + self.labels
        return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()

    def mistakes(self, actual: Tensor) -> list[int]:
        """The indices of the misclassified images, the most confident first.

        Args:
            actual: the true classes, int64 `[N]` on any device.
        """
        wrong = (self.labels != actual.to(self.labels.device)).nonzero().flatten()
        worst_first = self.confidence[wrong].argsort(descending=True, stable=True)
        indices: list[int] = wrong[worst_first].tolist()
        return indices


class MetricAccumulator:
    """Loss and right answers of a pass, kept on the device and read once at its end.

    Each rank counts its own images; reading adds them up, so all ranks must read when one does.
    """

    def __init__(self, steps: int, device: torch.device, world: SingleProcess = ALONE) -> None:
        self._world = world
        self._losses = torch.zeros(steps, device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._sizes: list[int] = []
        self.rates: list[float] = []

    @property
    def steps(self) -> int:
        """Batches counted so far."""
        return len(self._sizes)

    def add(self, loss: Tensor, right: Tensor, size: int, rate: float = 0.0) -> None:
        """Count a batch.

        Args:
            loss: the sum over this rank's images, divided by those of the whole batch.
            right: how many of this rank's images were classified rightly.
            size: images of the whole batch.
            rate: the learning rate.
        """
        self._losses[len(self._sizes)] = loss
        self._right += right
        self._sizes.append(size)
        self.rates.append(rate)

    def read(self) -> tuple[list[float], list[int], int]:
        """The mean loss of each batch, its size, and the right answers of them all; waits for the device."""
        losses = self._world.all_reduce_sum(self._losses[: self.steps].clone())
        return losses.tolist(), self._sizes, int(self._world.all_reduce_sum(self._right.clone()))

    def check_finite(self, epoch: int) -> None:
        """Wait for the device and look at the losses so far.

        Raises:
            TrainingError: one was not finite; names the first step where it was not.
        """
        for step, value in enumerate(self.read()[0]):
            if not math.isfinite(value):
                raise not_finite(value, epoch, step, self.rates[step])

    def state_dict(self) -> dict[str, Any]:
        """All of it, of all ranks, as plain values and CPU tensors."""
        return {
            "losses": self._world.all_reduce_sum(self._losses.clone()).cpu(),
            "right": int(self._world.all_reduce_sum(self._right.clone())),
            "sizes": list(self._sizes),
            "rates": list(self.rates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        if self._world.is_main:  # the sums of all ranks, of which there may be another number now
            self._losses.copy_(state["losses"])
            self._right.fill_(state["right"])
        self._sizes, self.rates = list(state["sizes"]), list(state["rates"])


def not_finite(loss: float, epoch: int, step: int, rate: float) -> TrainingError:
    """The error for a loss that is NaN or infinite; epochs and steps count from 0 here and from 1 in the message."""
    return TrainingError(
        f"the loss is {loss} in epoch {epoch + 1}, step {step + 1}, at learning rate {rate:g}; "
        "try a smaller optimizer.lr"
    )
