"""The progress of an epoch: metrics, times and logged steps."""

import math
from typing import Any

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import TrainingError
from vitmnist.metrics import epoch_table, get_metric_infos
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.training.model_runner import MetricSums
from vitmnist.training.step import TrainStep


class EpochProgress:
    """The progress of a training epoch. It can be saved after any step.

    Args:
        epoch: the epoch, counted from 0.
        log_every: log loss, learning rate and gradient norm every `log_every` steps of the run; None: never.
    """

    def __init__(
        self,
        epoch: int,
        sampler: EpochSampler,
        device: torch.device,
        log_every: int | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.epoch, self.sampler = epoch, sampler
        self.timer = EpochTimer(device)
        self.accumulator = MetricAccumulator(sampler, device, world)
        self._log_every = log_every
        self._first_step = epoch * len(sampler)
        """The step of the run at which the epoch begins."""
        self._lrs: list[float] = []
        """The learning rate of each step of the epoch."""
        self._gradient_norms: dict[int, Tensor | float] = {}
        """Maps a logged step of the epoch to its gradient norm, which stays on the device until read."""
        self._seconds_before_resume: dict[str, float] = {}
        """The seconds spent on this epoch before the run was resumed."""

    @property
    def num_batches(self) -> int:
        """The number of batches so far."""
        return self.accumulator.num_batches

    def record_step(self, step: TrainStep, sums: MetricSums) -> None:
        """Store a step before its update, without waiting for the device: sums, rate and, if logged, gradient norm."""
        index = self.num_batches
        self.accumulator.update(sums)
        self._lrs.append(step.lr)
        if self._log_every and (self._first_step + index) % self._log_every == 0:
            self._gradient_norms[index] = step.gradient_norm()

    def logged_steps(self) -> list[dict[str, Any]]:
        """Return `step` (over the run), `loss`, `lr` and `grad_norm` (None if not finite) of each logged step."""
        losses = self.accumulator.batch_losses()
        return [
            {
                "step": self._first_step + index,
                "loss": losses[index],
                "lr": self._lrs[index],
                "grad_norm": float(norm) if math.isfinite(norm) else None,
            }
            for index, norm in self._gradient_norms.items()
        ]

    def check_finite(self) -> None:
        """Raise `TrainingError` for the first batch whose loss is not finite; waits for the device."""
        for index, loss in enumerate(self.accumulator.batch_losses()):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} in epoch {self.epoch + 1}, step {index + 1}, at learning rate "
                    f"{self._lrs[index]:g}; try a smaller optimizer.lr"
                )

    def compute(self) -> dict[str, Any]:
        """Return the metrics so far, named as in `epoch_table`. Raises `TrainingError` if a loss is not finite."""
        self.check_finite()
        seconds = self._seconds()
        train_s = seconds["waiting"] + seconds["computing"] + seconds["other"]
        return {
            **{f"train_{name}": mean for name, mean in self.accumulator.compute().items()},
            epoch_table.TRAIN_S.name: train_s,
            epoch_table.FIRST_BATCH_S.name: seconds["first_batch"],
            epoch_table.DATA_WAIT_S.name: seconds["waiting"],
            epoch_table.DATA_WAIT_PCT.name: 100 * seconds["waiting"] / train_s,
            epoch_table.COMPUTE_S.name: seconds["computing"],
            epoch_table.HOST_LEAD_S.name: self.timer.host_lead_s,
            epoch_table.SAVE_S.name: seconds["saving"],
            epoch_table.IMAGES_PER_S.name: sum(self.accumulator.batch_sizes) / train_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values and CPU tensors; waits for the device."""
        return {
            "metrics": self.accumulator.state_dict(),
            "lrs": list(self._lrs),
            "gradient_norms": {index: float(norm) for index, norm in self._gradient_norms.items()},
            "seconds": self._seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.accumulator.load_state_dict(state["metrics"])
        self._lrs = list(state["lrs"])
        self._gradient_norms = dict(state["gradient_norms"])
        self._seconds_before_resume = state["seconds"]

    def _seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of the timer, and of the wait for the first batch, over all starts."""
        before, seconds = self._seconds_before_resume, self.timer.seconds()
        first_wait = next((duration for phase, duration in self.timer.spans() if phase == "waiting"), 0.0)
        first_batch = before.get("first_batch", first_wait)
        return {phase: before.get(phase, 0.0) + seconds[phase] for phase in seconds} | {"first_batch": first_batch}


class MetricAccumulator:
    """Loss and metrics of each batch of an epoch or an evaluation, kept on the device.

    Each rank adds its own images. Every read is a collective, so all ranks must read at the same point.
    """

    def __init__(self, sampler: EpochSampler, device: torch.device, world: World = SINGLE_PROCESS) -> None:
        self.num_batches = 0
        """The number of batches so far."""
        self._sampler, self._world = sampler, world
        self._sums = {"loss": torch.zeros(len(sampler), dtype=torch.float64, device=device)}
        """The sums of each batch, float64 `[batches]`, which represents counts and float32 losses exactly."""

    def update(self, sums: MetricSums) -> None:
        """Store the sums over this rank's images of the next batch."""
        if not self.num_batches:
            self._sums = {name: torch.zeros_like(self._sums["loss"]) for name in sums}
        for name, values in self._sums.items():
            values[self.num_batches] = sums[name]
        self.num_batches += 1

    @property
    def batch_sizes(self) -> list[int]:
        """The number of images of each batch so far, over all ranks."""
        return [self._sampler.num_images(batch) for batch in range(self.num_batches)]

    def batch_losses(self) -> list[float]:
        """Return the mean loss of each batch so far, over all ranks; waits for the device."""
        return [loss / size for loss, size in zip(self._gather("loss"), self.batch_sizes, strict=True)]

    def compute(self) -> dict[str, float]:
        """Return the mean of each metric over the images so far, in its unit."""
        scales = {"loss": 1, **{name: metric.scale for name, metric in get_metric_infos().items()}}
        num_images = sum(self.batch_sizes)
        return {name: scales[name] * math.fsum(self._gather(name)) / num_images for name in self._sums}

    def _gather(self, name: str) -> list[float]:
        """Return the sum of the loss or of a metric for each batch so far, over all ranks."""
        sums: list[float] = self._world.all_reduce_sum(self._sums[name][: self.num_batches].clone()).tolist()
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, as plain values and CPU tensors."""
        sums = {name: self._world.all_reduce_sum(values.clone()).cpu() for name, values in self._sums.items()}
        return {"num_batches": self.num_batches, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, also with another number of ranks."""
        self.num_batches = int(state["num_batches"])
        # The saved sums are over all ranks, so the other ranks start from 0.
        factor, device = int(self._world.is_main), self._sums["loss"].device
        self._sums = {name: factor * values.to(device) for name, values in state["sums"].items()}
