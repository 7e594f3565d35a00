"""One training step: learning rate, forward and backward pass, clipping, optimizer and weight average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitmnist.config.schema import Precision
from vitmnist.loaders.base import Loader
from vitmnist.optim.optimizers import EMA
from vitmnist.runtime.buffers import preserve_buffers
from vitmnist.runtime.device import set_float32_precision
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.runtime.world import World
from vitmnist.training.batch import Batch, load_batches
from vitmnist.training.model_runner import MetricSums, ModelRunner

KERNEL_OPTIONS = {"fused", "foreach", "capturable", "differentiable"}
"""The options of torch's optimizers that choose how an update is computed."""


@dataclass(eq=False)
class TrainStep:
    """Trains a model on one batch at a time.

    Whatever the options, the gradient equals the float32 gradient of the batch's mean loss up to rounding (summation
    order, lower-precision products). For the articles' transformer, the difference is below 1e-5 of the gradient's norm
    with microbatches and compiled code, and below 2% with bf16 (`tests/training/test_step.py`). This does not hold for
    models whose output is random, or depends on the whole batch (batch normalisation).

    With `precision=fp16`, the loss is scaled so that small gradients do not underflow (Micikevicius et al.,
    arXiv:1710.03740). A step whose gradients overflow leaves the weights unchanged, but counts as a step.

    Args:
        runner: computes the loss of a batch.
        optimizer: if it has the methods `train` and `eval`, as those of schedulefree, they are called around training.
        schedule: maps a step, counted from 0 over the run, to the factor of the learning rate.
        clip_norm: the maximum norm of all gradients together (Pascanu et al., arXiv:1211.5063); None: no clipping.
        ema: the moving average of the weights; None: no average.
    """

    runner: ModelRunner
    optimizer: Optimizer
    schedule: Callable[[int], float]
    clip_norm: float | None = None
    ema: EMA | None = None

    def __post_init__(self) -> None:
        self.model, self.preprocess = self.runner.model, self.runner.preprocess
        self.device = self.preprocess.mean.device
        self.completed_steps = 0
        """The number of steps since the beginning of the run."""
        self._parameters = list(self.model.parameters())  # Walking the modules in each step would take 0.1 ms.
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._world_size = 1
        precision = self.runner.options.precision
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == Precision.fp16)
        self._skipped_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._use_tf32 = precision == Precision.tf32  # Evaluation never does.
        self.train_mode()

    @property
    def evaluated_model(self) -> nn.Module:
        """The model to evaluate, and to save at the end: the averaged model, if there is an EMA."""
        return self.ema.model if self.ema else self.model

    @property
    def lr(self) -> float:
        """The learning rate of the next update; the highest if `lr_scale` sets several."""
        return max(self._base_lrs) * self.schedule(self.completed_steps)

    def train_mode(self) -> None:
        """Set the model to training mode, except frozen batch normalisations, and so the optimizer if it has modes."""
        self.runner.train_mode()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval_mode(self) -> None:
        """Let an optimizer that has modes replace the weights by those to evaluate and to save."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def batches(self, loader: Loader, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """Return the batches of an epoch from batch `start` on; see `load_batches`."""
        # All keys of the epoch are drawn here, so that their cost is not counted as waiting for the loader.
        return load_batches(loader, epoch, start, self.preprocess.random_keys(loader.sampler, epoch, start))

    def __call__(self, batch: Batch) -> MetricSums:
        """Train on a batch, without waiting for the device; returns what `forward_backward` returns."""
        sums = self.forward_backward(batch)
        self.update()
        return sums

    def forward_backward(self, batch: Batch) -> MetricSums:
        """Compute the gradient of the mean loss of the global batch.

        Returns:
            The sums of the loss and of each metric over this rank's images: scalar tensors on the device.
        """
        for parameter in self._parameters:
            parameter.grad = None
        totals: MetricSums = {}
        microbatches = self.runner.prepare_microbatches(batch)
        for micro in microbatches:
            # DDP all-reduces the gradients once, in the backward pass of the last microbatch.
            skip_all_reduce = nullcontext() if micro is microbatches[-1] else self.runner.skip_all_reduce()
            with set_float32_precision(self._use_tf32), skip_all_reduce:
                sums = self.runner.compute_sums(micro)
                loss = sums["loss"] / batch.global_size
                # DDP averages the gradients over the ranks, but the gradient of the global batch is their sum.
                self._scaler.scale(loss * self._world_size).backward()
            for name, value in sums.items():
                totals[name] = totals.get(name, 0) + value.detach()
        self._unscale_gradients()
        return totals

    def _unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale of fp16, and count a step that overflowed."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self.optimizer)
            self._skipped_steps += ~self.gradient_norm().isfinite()

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together, a scalar tensor on the device."""
        return nn.utils.get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def update(self) -> None:
        """Update the weights with the gradients, and then their average."""
        factor = self.schedule(self.completed_steps)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self.ema:
            self.ema.update()
        self.completed_steps += 1

    def pop_skipped_steps(self) -> int:
        """Return how many steps since the last call left the weights unchanged; waits for the device."""
        skipped_steps = int(self._skipped_steps)
        self._skipped_steps.zero_()
        return skipped_steps

    def compile_or_capture(self, loader: Loader) -> None:
        """If configured, compile or capture the step for the dtype of the images; drop only the gradients."""
        options = self.runner.options
        if not (options.compile or options.graph):
            return
        with closing(self.batches(loader, 0)) as batches:
            batch = next(batches)
        with self.preserved_state(), set_float32_precision(self._use_tf32):
            self.runner.prepare(batch)

    def sum_gradients_over(self, world: World) -> None:
        """Let each step use the gradient of the global batch, over all ranks."""
        self.runner.wrap_ddp(world)
        self._world_size = world.size
        if self.ema:  # DDP has copied the weights of rank 0 into the model; start the average from them.
            self.ema.model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, loss, optimizer, schedule, loss scale and EMA."""
        loss = self.runner.loss
        return {
            "model": self.model.state_dict(),
            "loss": loss.state_dict() if isinstance(loss, nn.Module) else None,
            "optimizer": self.optimizer.state_dict(),
            "averages_weights": hasattr(self.optimizer, "eval"),  # Within an epoch, the weights are those of training.
            "completed_steps": self.completed_steps,
            "scaler": self._scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the state of another model or optimizer can raise any error."""
        self.model.load_state_dict(state["model"])
        loss = self.runner.loss
        if isinstance(loss, nn.Module) and state.get("loss"):  # Earlier checkpoints do not have it.
            loss.load_state_dict(state["loss"])
        # An optimizer can keep a part of its state, such as a count of steps, next to the options of a group.
        saved, current = state["optimizer"], self.optimizer.state_dict()["param_groups"]
        groups = [
            old | {name: new[name] for name in KERNEL_OPTIONS & new.keys()}
            for old, new in zip(saved["param_groups"], current, strict=True)
        ]
        self.optimizer.load_state_dict({**saved, "param_groups": groups})
        self.completed_steps = int(state["completed_steps"])
        if state["scaler"]:  # Empty, unless the run used fp16.
            self._scaler.load_state_dict(state["scaler"])
        self._skipped_steps.zero_()
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    @contextmanager
    def preserved_state(self) -> Iterator[None]:
        """Restore the state, all buffers and the random generators on exit, and drop the gradients."""
        before = copy.deepcopy(self.state_dict())
        try:
            with preserve_random_state(device=self.device), preserve_buffers(self.model):
                yield
        finally:
            self.load_state_dict(before)
            self.model.zero_grad()
