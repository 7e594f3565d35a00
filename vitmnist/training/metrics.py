"""Loss and accuracy of a pass over a split, kept on the device until its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import TrainingError
from vitmnist.runtime.world import SINGLE_PROCESS, World


class MetricAccumulator:
    """Loss and number of correct predictions of a pass.

    Each rank accumulates its own images. Reading sums over the ranks, so all ranks must read when one does.

    Args:
        sampler: gives the number of batches, and how many images each has.
    """

    def __init__(self, sampler: EpochSampler, device: torch.device, world: World = SINGLE_PROCESS) -> None:
        self._world = world
        self._sampler = sampler.global_sampler
        self._losses = torch.zeros(len(sampler), device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self.lrs: list[float] = []
        """The learning rate of each batch so far."""

    @property
    def steps(self) -> int:
        """Batches so far."""
        return len(self.lrs)

    def update(self, loss: Tensor, correct: Tensor, lr: float = 0.0) -> None:
        """Add a batch.

        Args:
            loss: the sum over this rank's images, divided by the size of the global batch.
            correct: this rank's correct predictions.
        """
        self._losses[self.steps] = loss
        self._correct += correct
        self.lrs.append(lr)

    def batch_losses(self) -> list[float]:
        """The mean loss of each batch so far; waits for the device."""
        losses: list[float] = self._world.all_reduce_sum(self._losses[: self.steps].clone()).tolist()
        return losses

    def compute(self) -> tuple[float, float, int]:
        """Mean loss per image, accuracy in percent, and number of images so far; waits for the device."""
        sizes = [self._sampler.num_valid(batch) for batch in range(self.steps)]
        images = sum(sizes)
        # Weighted by size, because the last batch may be smaller.
        total = math.fsum(loss * size for loss, size in zip(self.batch_losses(), sizes, strict=True))
        correct = int(self._world.all_reduce_sum(self._correct.clone()))
        return total / images, 100 * correct / images, images

    def check_finite(self, epoch: int) -> None:
        """Raise `TrainingError` for the first batch whose loss is not finite; waits for the device."""
        for step, loss in enumerate(self.batch_losses()):
            if not math.isfinite(loss):
                raise non_finite_loss(loss, epoch, step, self.lrs[step])

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks, as plain values and CPU tensors."""
        return {
            "losses": self._world.all_reduce_sum(self._losses.clone()).cpu(),
            "correct": int(self._world.all_reduce_sum(self._correct.clone())),
            "lrs": list(self.lrs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, also with another number of ranks."""
        losses, correct = state["losses"].view_as(self._losses), int(state["correct"])
        self.lrs = [float(lr) for lr in state["lrs"]]
        if len(self.lrs) > len(losses):
            raise ValueError("the epoch has fewer steps")
        if self._world.is_main:  # holds the sums; the other ranks start from zero
            self._losses[:] = losses
            self._correct.fill_(correct)


def non_finite_loss(loss: float, epoch: int, step: int, lr: float) -> TrainingError:
    """The error for a loss that is NaN or infinite; `epoch` and `step` count from 0, in the message from 1."""
    return TrainingError(
        f"the loss is {loss} in epoch {epoch + 1}, step {step + 1}, at learning rate {lr:g}; try a smaller optimizer.lr"
    )


@dataclass(frozen=True)
class Predictions:
    """Predicted class and softmax confidence per image, in split order, on the device.

    Args:
        labels: int64 `[N]`, the most likely class.
        confidence: float `[N]`, its softmax probability.
    """

    labels: Tensor
    confidence: Tensor

    def confusion_matrix(self, targets: Tensor, classes: int) -> Tensor:
        """Number of images by true class (rows) and predicted class (columns): int64 `[classes, classes]`, CPU.

        Args:
            targets: the true classes, int64 `[N]` on any device.
        """
        pairs = targets.to(self.labels.device) * classes + self.labels
        return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()

    def mistakes(self, targets: Tensor) -> list[int]:
        """Indices of the misclassified images, the most confident first.

        Args:
            targets: the true classes, int64 `[N]` on any device.
        """
        wrong = (self.labels != targets.to(self.labels.device)).nonzero().flatten()
        order = self.confidence[wrong].argsort(descending=True, stable=True)
        indices: list[int] = wrong[order].tolist()
        return indices
