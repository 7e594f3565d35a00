"""The training loop and the evaluation loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.training.metrics import MetricAccumulator, Predictions, non_finite_loss
from vitmnist.training.step import TrainStep

AfterStep = Callable[[EpochTimer], object]
"""Called after each batch, outside of the computing time: progress bar, profiler, checkpoint, signals."""


def train_epoch(
    step: TrainStep, loader: Loader, progress: EpochProgress, after_step: AfterStep = lambda timer: None
) -> dict[str, float]:
    """Train on the batches of an epoch that are not done yet, one step per batch.

    Returns:
        The epoch's metrics by their names in `vitmnist.tracking.metrics`.

    Raises:
        TrainingError: a loss is not finite; names the first such step.
    """
    metrics, sampler = progress.metrics, loader.sampler
    step.model.train()
    step.on_gradients = progress.log_gradients
    timer = progress.start_timer()
    for inputs, keys in timer.waiting(step.batches(loader, progress.epoch, start=metrics.steps)):
        lr, batch = step.lr, metrics.steps
        loss, correct = step(inputs, keys, sampler.global_sampler.num_valid(batch))
        # Only where it is free: on a GPU the check would wait for the device, and a rank that raised here would leave
        # the others waiting for its gradients. There `compute` checks all losses at the end of the epoch.
        if step.device.type == "cpu" and progress.world.size == 1 and not loss.isfinite():
            raise non_finite_loss(float(loss), progress.epoch, batch, lr)
        metrics.update(loss, correct, lr)
        timer.begin("other")
        after_step(timer)
    timer.stop()
    return progress.compute()


class EpochProgress:
    """A training epoch and its progress: metrics, times and logged steps. Can be saved at any step.

    Args:
        epoch: counted from 0.
        sampler: of the training loader.
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
        self.epoch, self.world = epoch, world
        self.metrics = MetricAccumulator(sampler, device, world)
        self._device, self._log_every, self._steps_per_epoch = device, log_every, len(sampler)
        self._gradient_norms: dict[int, Tensor] = {}  # by the step of the epoch; on the device until they are read
        # Of the processes that trained on this epoch before:
        self._seconds_before: dict[str, float] = {}
        self._first_batch_before: float | None = None

    def start_timer(self) -> EpochTimer:
        """Start timing, with the device at rest."""
        self.timer = EpochTimer(self._device)
        return self.timer

    def log_gradients(self, model: nn.Module) -> None:
        """Take the norm of the gradients if this step is logged; does not wait for the device."""
        step = self.metrics.steps
        if self._log_every and (self.epoch * self._steps_per_epoch + step) % self._log_every == 0:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            self._gradient_norms[step] = nn.utils.get_total_norm(gradients)

    def logged_steps(self) -> list[dict[str, Any]]:
        """Step (counted over the run), loss, lr and grad_norm of the logged steps; None for a norm that is not finite.

        Waits for the device.
        """
        losses = self.metrics.batch_losses()
        return [
            {
                "step": self.epoch * self._steps_per_epoch + step,
                "loss": losses[step],
                "lr": self.metrics.lrs[step],
                "grad_norm": norm if math.isfinite(norm) else None,
            }
            for step, norm in self._read_norms().items()
        ]

    def compute(self) -> dict[str, float]:
        """The metrics so far, by their names in `vitmnist.tracking.metrics`; waits for the device.

        Raises:
            TrainingError: a loss is not finite.
        """
        self.metrics.check_finite(self.epoch)
        loss, accuracy, images = self.metrics.compute()
        seconds = self._seconds()
        train_s = seconds["waiting"] + seconds["computing"] + seconds["other"]
        return {
            "train_loss": loss,
            "train_acc": accuracy,
            "train_s": train_s,
            "first_batch_s": self._first_batch_s(),
            "data_wait_s": seconds["waiting"],
            "data_wait_pct": 100 * seconds["waiting"] / train_s,
            "compute_s": seconds["computing"],
            "save_s": seconds["saving"],
            "images_per_s": images / train_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """The progress as plain values and CPU tensors; waits for the device."""
        return {
            "metrics": self.metrics.state_dict(),
            "seconds": self._seconds(),
            "first_batch_s": self._first_batch_s(),
            "norms": self._read_norms(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.metrics.load_state_dict(state["metrics"])
        self._seconds_before = {phase: float(seconds) for phase, seconds in state["seconds"].items()}
        self._first_batch_before = float(state["first_batch_s"])
        for step, norm in state["norms"].items():
            self.metrics.lrs[step]  # raises for a step that is not done
            self._gradient_norms[step] = torch.tensor(float(norm), device=self._device)

    def _seconds(self) -> dict[str, float]:
        now = self.timer.seconds()
        return {phase: self._seconds_before.get(phase, 0.0) + seconds for phase, seconds in now.items()}

    def _first_batch_s(self) -> float:
        """Seconds that the first step of the epoch waited for its batch."""
        return self.timer.first_wait() if self._first_batch_before is None else self._first_batch_before

    def _read_norms(self) -> dict[int, float]:
        norms = self._gradient_norms
        return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True)) if norms else {}


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    after_step: AfterStep = lambda timer: None,
    world: World = SINGLE_PROCESS,
) -> tuple[dict[str, float], Predictions]:
    """Evaluate a model on the loader's epoch 0, in float32.

    Several ranks evaluate a part each; all of them return the metrics and predictions of every image.

    Returns:
        The metrics by their names in `vitmnist.tracking.metrics`, and the predictions.
    """
    model.eval()
    sampler, device = loader.sampler, preprocess.mean.device
    metrics = MetricAccumulator(sampler, device, world)
    confidence, predicted = [], []
    timer = EpochTimer(device)
    with torch.inference_mode():
        for images, labels in timer.waiting(loader.epoch(0)):
            # A rank without an image of the last batch has received a padding image.
            valid, size = sampler.num_valid(metrics.steps), sampler.global_sampler.num_valid(metrics.steps)
            logits, targets = model(preprocess(images))[:valid], labels[:valid]
            probability, label = logits.softmax(dim=1).max(dim=1)
            metrics.update(F.cross_entropy(logits, targets, reduction="sum") / size, (label == targets).sum())
            confidence.append(probability)
            predicted.append(label)
            timer.begin("other")
            after_step(timer)
    timer.stop()
    seconds = timer.seconds()
    saving = seconds.pop("saving")
    loss, accuracy, _ = metrics.compute()
    predictions = _of_all_ranks(Predictions(torch.cat(predicted), torch.cat(confidence)), sampler, world)
    return {"eval_loss": loss, "eval_acc": accuracy, "eval_s": sum(seconds.values()), "save_s": saving}, predictions


def _of_all_ranks(own: Predictions, sampler: EpochSampler, world: World) -> Predictions:
    """The predictions of all ranks, in split order."""
    if world.size == 1:
        return own
    # A padding image, if there is one, is the rank's last image.
    indices = sampler.indices(0, device=own.labels.device)[: len(own.labels)]
    size = sampler.global_sampler.size
    return Predictions(
        *(
            world.all_reduce_sum(part.new_zeros(size).index_copy_(0, indices, part))
            for part in (own.labels, own.confidence)
        )
    )
