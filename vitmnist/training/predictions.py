"""What a model predicts for the images of a split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.world import World


@dataclass(frozen=True)
class Predictions:
    """Predicted class and softmax confidence per image, in split order, on the device.

    Args:
        labels: int64 `[N]`, the most likely class.
        confidence: float `[N]`, its softmax probability.
        targets: int64 `[N]`, the true class.
    """

    labels: Tensor
    confidence: Tensor
    targets: Tensor

    def confusion_matrix(self, classes: int) -> Tensor:
        """Number of images by true class (rows) and predicted class (columns): int64 `[classes, classes]`, CPU."""
        pairs = self.targets * classes + self.labels
        return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()

    def mistakes(self) -> list[int]:
        """Indices of the misclassified images, the most confident first."""
        wrong = (self.labels != self.targets).nonzero().flatten()
        order = self.confidence[wrong].argsort(descending=True, stable=True)
        indices: list[int] = wrong[order].tolist()
        return indices


class PredictionCollector:
    """Collects the predictions of this rank's batches, and gathers them over the ranks.

    Args:
        sampler: the sampler of the evaluated batches.
    """

    def __init__(self, sampler: EpochSampler, world: World) -> None:
        self._sampler, self._world = sampler, world
        self._labels: list[Tensor] = []
        self._confidence: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch, without its padding.

        Args:
            logits: float32 `[B, classes]`.
            targets: int64 `[B]`, the true classes.
        """
        self._labels.append(logits.argmax(dim=1))
        self._confidence.append(logits.softmax(dim=1).amax(dim=1))
        self._targets.append(targets)

    def compute(self) -> Predictions:
        """The predictions of all images; every rank must call it."""
        return Predictions(*map(self._gather, (self._labels, self._confidence, self._targets)))

    def _gather(self, batches: list[Tensor]) -> Tensor:
        """The values of the images of all ranks, in split order."""
        values = torch.cat(batches)
        # The rank's padding image, if it has one, is the last one. It has no prediction.
        indices = self._sampler.indices(0, device=values.device)[: len(values)]
        gathered = values.new_zeros(self._sampler.size).index_copy_(0, indices, values)
        return self._world.all_reduce_sum(gathered)
