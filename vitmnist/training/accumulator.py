"""Loss and metrics of a pass over a split, kept on the device until its end, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError
from vitmnist.metrics.base import METRICS, batch_metrics
from vitmnist.runtime.world import SINGLE_PROCESS, World


class MetricAccumulator:
    """The sums of each batch of a pass, by name.

    Each rank accumulates its own images. Reading is an all-reduce over the ranks, so all must read when one does.

    Args:
        sampler: gives the number of batches, and how many images each has.
    """

    def __init__(self, sampler: EpochSampler, device: torch.device, world: World = SINGLE_PROCESS) -> None:
        self.steps = 0
        """Batches so far."""
        self._sampler, self._world = sampler.global_sampler, world
        # float64 holds counts and the float32 losses exactly.
        self._sums = {
            name: torch.zeros(len(sampler), dtype=torch.float64, device=device) for name in ("loss", *batch_metrics())
        }

    def update(self, sums: dict[str, Tensor]) -> None:
        """Add a batch.

        Args:
            sums: of this rank's images; `loss` is divided by the size of the global batch.
        """
        for name, values in self._sums.items():
            values[self.steps] = sums[name]
        self.steps += 1

    @property
    def sizes(self) -> list[int]:
        """Images of each batch so far, of all ranks."""
        return [self._sampler.num_valid(batch) for batch in range(self.steps)]

    def per_batch(self, name: str) -> list[float]:
        """The sum of each batch so far, of all ranks; waits for the device."""
        values: list[float] = self._world.all_reduce_sum(self._sums[name][: self.steps].clone()).tolist()
        return values

    def compute(self, split: str) -> dict[str, float]:
        """Means over the images so far, in percent where that is the unit: `SPLIT_loss`, `SPLIT_acc`, …

        Waits for the device.
        """
        sizes = self.sizes
        # Weighted by size, because the last batch may be smaller.
        means = {"loss": math.fsum(map(mul, self.per_batch("loss"), sizes)) / sum(sizes)}
        for name in batch_metrics():
            scale = 100 if METRICS.options_of(name).unit == "%" else 1
            means[name] = scale * math.fsum(self.per_batch(name)) / sum(sizes)
        return {f"{split}_{name}": mean for name, mean in means.items()}

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks, as plain values and CPU tensors."""
        sums = {name: self._world.all_reduce_sum(values.clone()).cpu() for name, values in self._sums.items()}
        return {"steps": self.steps, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, also with another number of ranks.

        Raises:
            DataError: it was saved with other metrics.
        """
        if differing := state["sums"].keys() ^ self._sums.keys():
            raise DataError(
                f"the run was stopped within an epoch, with other metrics: {', '.join(sorted(differing))}; resume it "
                "with the same files in vitmnist/metrics"
            )
        self.steps = int(state["steps"])
        if self._world.is_main:  # holds the sums; the other ranks start from zero
            for name, values in self._sums.items():
                values[:] = state["sums"][name]


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
