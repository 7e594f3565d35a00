"""The training loop and the evaluation loop, their metrics and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, TrainingError
from vitmnist.loaders.base import Loader
from vitmnist.metrics import METRICS, batch_metrics, confusion_metrics
from vitmnist.metrics.epoch_table import (
    COMPUTE_S,
    DATA_WAIT_PCT,
    DATA_WAIT_S,
    EVAL_S,
    FIRST_BATCH_S,
    IMAGES_PER_S,
    SAVE_S,
    TRAIN_S,
    metric_name,
)
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.training.step import TrainStep

AfterStep = Callable[[EpochTimer], object]
"""Called after each batch, outside of the computing time: progress bar, checkpoint, signals."""


def train_epoch(
    step: TrainStep, loader: Loader, progress: EpochProgress, after_step: AfterStep = lambda timer: None
) -> dict[str, float]:
    """Train on the remaining batches of an epoch, one step per batch.

    Returns:
        The epoch's metrics by their names in `vitmnist.metrics.epoch_table`.

    Raises:
        DataError: the loader delivers too few batches.
        TrainingError: a loss is not finite; names the first such step.
    """
    metrics = progress.metrics
    step.train_mode()
    timer = progress.timer
    timer.start()  # This synchronises, so that the epoch is not charged for work that was queued before.
    for batch in timer.waiting(step.batches(loader, progress.epoch, start=metrics.steps)):
        sums = step(batch, progress.log_step)
        metrics.update(sums)
        timer.begin("other")
        after_step(timer)
    timer.stop()
    metrics.check_complete()
    return progress.compute()


class EpochProgress:
    """A training epoch and its progress: metrics, times and logged steps. Can be saved at any step.

    Args:
        epoch: counted from 0.
        sampler: the sampler of the training loader.
        log_every: log loss, learning rate and gradient norm of every n-th step of the run; None logs none.
    """

    def __init__(
        self,
        epoch: int,
        sampler: EpochSampler,
        device: torch.device,
        log_every: int | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.epoch = epoch
        self.timer = EpochTimer(device)
        self.metrics = MetricAccumulator(sampler, device, world)
        self._log_every = log_every
        self._first_step = epoch * len(sampler)
        """The step of the run at which the epoch begins."""
        self._lrs: list[float] = []
        """The learning rate of each step of the epoch."""
        self._gradient_norms: dict[int, Tensor | float] = {}
        """The gradient norms of the logged steps, by the step of the epoch, on the device until they are read."""
        self._seconds_before: dict[str, float] = {}
        """The seconds of earlier starts, if the run was resumed within this epoch."""

    def log_step(self, step: TrainStep) -> None:
        """Store the learning rate and, if the step is logged, the gradient norm; does not wait for the device."""
        index = self.metrics.steps
        self._lrs.append(step.lr)
        if self._log_every and (self._first_step + index) % self._log_every == 0:
            gradients = [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]
            self._gradient_norms[index] = nn.utils.get_total_norm(gradients)

    def logged_steps(self) -> list[dict[str, Any]]:
        """Step (counted over the run), loss, lr and grad_norm of the logged steps; None for a norm that is not finite.

        Waits for the device.
        """
        losses = self.metrics.per_batch("loss")
        return [
            {
                "step": self._first_step + step,
                "loss": losses[step],
                "lr": self._lrs[step],
                "grad_norm": norm if math.isfinite(norm) else None,
            }
            for step, norm in self._read_norms().items()
        ]

    def check_finite(self) -> None:
        """Raise `TrainingError` for the first batch whose loss is not finite; waits for the device."""
        for step, loss in enumerate(self.metrics.per_batch("loss")):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} in epoch {self.epoch + 1}, step {step + 1}, at learning rate "
                    f"{self._lrs[step]:g}; try a smaller optimizer.lr"
                )

    def compute(self) -> dict[str, float]:
        """The metrics so far, by their names in `vitmnist.metrics.epoch_table`; waits for the device.

        Raises:
            TrainingError: a loss is not finite.
        """
        self.check_finite()
        seconds = self._seconds()
        train_s = seconds["waiting"] + seconds["computing"] + seconds["other"]
        return {
            **self.metrics.compute("train"),
            TRAIN_S.name: train_s,
            FIRST_BATCH_S.name: seconds["first_batch"],
            DATA_WAIT_S.name: seconds["waiting"],
            DATA_WAIT_PCT.name: 100 * seconds["waiting"] / train_s,
            COMPUTE_S.name: seconds["computing"],
            SAVE_S.name: seconds["saving"],
            IMAGES_PER_S.name: sum(self.metrics.sizes) / train_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """The progress as plain values and CPU tensors; waits for the device."""
        return {
            "metrics": self.metrics.state_dict(),
            "lrs": list(self._lrs),
            "norms": self._read_norms(),
            "seconds": self._seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.metrics.load_state_dict(state["metrics"])
        self._lrs = list(state["lrs"])
        self._gradient_norms = dict(state["norms"])
        self._seconds_before = state["seconds"]

    def _read_norms(self) -> dict[int, float]:
        return {step: float(norm) for step, norm in self._gradient_norms.items()}

    def _seconds(self) -> dict[str, float]:
        """Seconds of each phase of the timer, and of the wait for the first batch of the epoch."""
        before, seconds = self._seconds_before, self.timer.seconds()
        first_batch = before.get("first_batch", self.timer.first_wait())
        return {phase: before.get(phase, 0.0) + seconds[phase] for phase in seconds} | {"first_batch": first_batch}


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    after_step: AfterStep = lambda timer: None,
    world: World = SINGLE_PROCESS,
) -> tuple[dict[str, float], Predictions]:
    """Evaluate a model on the loader's epoch 0, in float32 and without augmentation.

    With several ranks, each evaluates a part, and all return the metrics and predictions of every image.

    Returns:
        The metrics by their names in `vitmnist.metrics.epoch_table`, and the predictions.

    Raises:
        DataError: the loader delivers too few batches.
    """
    model.eval()
    world.broadcast_buffers(model)  # The statistics of rank 0 are saved, so all ranks evaluate with them.
    sampler, device = loader.sampler, preprocess.mean.device
    metrics = MetricAccumulator(sampler, device, world)
    functions, batches = batch_metrics(), []
    timer = EpochTimer(device)
    timer.start()
    with torch.inference_mode():
        for images, labels in timer.waiting(loader.epoch(0)):
            # If the last batch has no image for this rank, the rank gets an image of padding, and `valid` is 0.
            valid, size = sampler.num_valid(metrics.steps), sampler.num_images(metrics.steps)
            logits, targets = model(preprocess(images))[:valid], labels[:valid]
            loss = F.cross_entropy(logits, targets, reduction="sum") / size
            metrics.update({"loss": loss} | {name: compute(logits, targets) for name, compute in functions.items()})
            batches.append((logits.argmax(dim=1), logits.softmax(dim=1).amax(dim=1), targets))
            timer.begin("other")
            after_step(timer)
    timer.stop()
    metrics.check_complete()
    seconds = timer.seconds()
    saving = seconds.pop("saving")
    labels, confidence, targets = map(torch.cat, zip(*batches, strict=True))
    # The rank's padding image, if it has one, is the last one. It has no prediction.
    indices = sampler.indices(0, device=device)[: len(labels)]

    def in_split_order(values: Tensor) -> Tensor:
        """The values of the images of all ranks."""
        return world.all_reduce_sum(values.new_zeros(sampler.size).index_copy_(0, indices, values))

    predictions = Predictions(in_split_order(labels), in_split_order(confidence), in_split_order(targets))
    values = metrics.compute("eval")
    for name, value in confusion_metrics(predictions.confusion_matrix(logits.shape[1])).items():
        values[metric_name("eval", name)] = value
    return {**values, EVAL_S.name: sum(seconds.values()), SAVE_S.name: saving}, predictions


class MetricAccumulator:
    """The sums of each batch of a pass, by name.

    Each rank accumulates its own images. Reading is an all-reduce over the ranks, so all must read when one does.

    Args:
        sampler: gives the number of batches, and how many images each has.
    """

    def __init__(self, sampler: EpochSampler, device: torch.device, world: World = SINGLE_PROCESS) -> None:
        self.steps = 0
        """Batches so far."""
        self._sampler, self._world = sampler, world
        # float64 holds counts and the float32 losses exactly.
        self._sums = {
            name: torch.zeros(len(sampler), dtype=torch.float64, device=device) for name in ("loss", *batch_metrics())
        }

    def update(self, sums: dict[str, Tensor]) -> None:
        """Add a batch.

        Args:
            sums: the sums over this rank's images; `loss` is divided by the size of the global batch.
        """
        for name, values in self._sums.items():
            values[self.steps] = sums[name]
        self.steps += 1

    def check_complete(self) -> None:
        """Raise `DataError` if the loader has delivered fewer batches than the epoch has."""
        if self.steps < len(self._sampler):
            raise DataError(f"the loader delivered {self.steps} of the {len(self._sampler)} batches of an epoch")

    @property
    def sizes(self) -> list[int]:
        """Images of each batch so far, of all ranks."""
        return [self._sampler.num_images(batch) for batch in range(self.steps)]

    def per_batch(self, name: str) -> list[float]:
        """The sum of each batch so far, of all ranks; waits for the device."""
        values: list[float] = self._world.all_reduce_sum(self._sums[name][: self.steps].clone()).tolist()
        return values

    def compute(self, split: str) -> dict[str, float]:
        """Means over the images so far, in percent where that is the unit: `SPLIT_loss`, `SPLIT_acc`, …

        Waits for the device.
        """
        sizes = self.sizes
        # Batches are weighted by their size, because the last one may be smaller.
        means = {"loss": math.fsum(map(mul, self.per_batch("loss"), sizes)) / sum(sizes)}
        for name in batch_metrics():
            scale = 100 if METRICS.options_of(name).unit == "%" else 1
            means[name] = scale * math.fsum(self.per_batch(name)) / sum(sizes)
        return {metric_name(split, name): mean for name, mean in means.items()}

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks, as plain values and CPU tensors."""
        sums = {name: self._world.all_reduce_sum(values.clone()).cpu() for name, values in self._sums.items()}
        return {"steps": self.steps, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, also with another number of ranks."""
        self.steps = int(state["steps"])
        if self._world.is_main:  # The sums are over all ranks, so the other ranks start from zero.
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
