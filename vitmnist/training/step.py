"""One training step: learning rate, forward and backward pass, clipping, optimizer and weight average."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitmnist.config.schema import Precision
from vitmnist.data.randomness import preserved_random_state
from vitmnist.errors import first_line
from vitmnist.loaders.base import Loader
from vitmnist.optim.optimizers import EMA
from vitmnist.runtime.world import World
from vitmnist.training.batch import IGNORED, Batch, enumerate_batches
from vitmnist.training.step_options import StepOptions
from vitmnist.training.step_runner import Mode, StepRunner, Sums

log = logging.getLogger(__name__)


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
        runner: runs the model and the loss.
        schedule: maps a step, counted from 0 over the run, to the factor of the learning rate.
        options: the options of the step. `prepare` replaces a value of `auto` that fails, and records the reason.
        clip_norm: the maximum norm of all gradients together (Pascanu et al., arXiv:1211.5063); None: no clipping.
        ema: the moving average of the weights; None: no average.
        frozen_batch_norms: batch normalisations whose running statistics do not change in training.
    """

    runner: StepRunner
    optimizer: Optimizer
    schedule: Callable[[int], float]
    options: StepOptions = field(default_factory=StepOptions)
    clip_norm: float | None = None
    ema: EMA | None = None
    frozen_batch_norms: Sequence[nn.Module] = ()

    def __post_init__(self) -> None:
        self.model, self.preprocess = self.runner.model, self.runner.preprocess
        self.device = self.preprocess.mean.device
        self.compile_s = 0.0
        """The seconds spent on compiling or on capturing graphs."""
        self.completed_steps = 0
        """The number of steps since the beginning of the run."""
        self._parameters = list(self.model.parameters())  # Walking the modules in each step would take 0.1 ms.
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._world_size = 1
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.options.precision == Precision.fp16)
        self._skipped_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.train_mode()  # `prepare` compiles the code of this mode.

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate, and to save at the end: the averaged model, if there is an EMA."""
        return self.ema.model if self.ema else self.model

    @property
    def current_lr(self) -> float:
        """The learning rate of the latest step; the highest if `lr_scale` sets several."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def train_mode(self) -> None:
        """Set the model to training mode, except frozen batch normalisations."""
        self.model.train()
        for norm in self.frozen_batch_norms:
            norm.eval()

    def batches(self, loader: Loader, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch from batch `start` on, for `__call__`; raises as `enumerate_batches` does."""
        sampler = loader.sampler
        # Draw the epoch's keys up front so that their cost is not counted as waiting for the loader.
        all_keys = self.preprocess.keys(sampler, epoch, start)

        def generate() -> Generator[Batch, None, None]:
            for (index, (images, loaded)), keys in zip(enumerate_batches(loader, epoch, start), all_keys, strict=False):
                # A rank without images in the last batch receives one image of padding; see `EpochSampler`.
                labels = loaded if sampler.num_rank_images(index) else torch.full_like(loaded, IGNORED)
                yield Batch(images, labels, sampler.num_images(index), keys)

        return generate()

    def __call__(self, batch: Batch, before_clipping: Callable[[TrainStep], object] = lambda step: None) -> Sums:
        """Train on a batch, without waiting for the device.

        Args:
            before_clipping: called with the complete gradients, before they are clipped.

        Returns:
            The sums over this rank's images. `loss` is divided by the size of the global batch; its sum over the ranks
            is the mean loss.
        """
        factor = self.schedule(self.completed_steps)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        sums = self.forward_backward(batch)
        self._unscale_gradients()
        before_clipping(self)  # Clipping and Nesterov SGD modify the gradients in place.
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self.ema:
            self.ema.update()
        self.completed_steps += 1
        return sums

    def forward_backward(self, batch: Batch) -> Sums:
        """Compute the gradient of the loss, averaged over the global batch. Returns the same sums as `__call__`."""
        for parameter in self._parameters:
            parameter.grad = None
        sums: Sums = {}
        microbatches = self.runner.microbatches(batch)
        for micro in microbatches:
            is_last = micro is microbatches[-1]
            # DDP all-reduces the gradients once, in the backward pass of the last microbatch.
            with nullcontext() if is_last else self.runner.skip_all_reduce(), self.runner.float32_products():
                outputs = self.runner(micro)
                loss = outputs["loss"] / batch.global_size
                # DDP averages the gradients over the ranks, but the gradient of the global batch is their sum.
                self._scaler.scale(loss * self._world_size).backward()
            for name, value in (outputs | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def _unscale_gradients(self) -> None:
        if self._scaler.is_enabled():
            self._scaler.unscale_(self.optimizer)
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            self._skipped_steps += ~nn.utils.get_total_norm(gradients).isfinite()

    def pop_skipped_steps(self) -> int:
        """Return how many steps since the last call left the weights unchanged; waits for the device."""
        skipped_steps = int(self._skipped_steps)
        self._skipped_steps.zero_()
        return skipped_steps

    def prepare(self, loader: Loader) -> None:
        """If configured, compile the step or capture its graph for the dtype of the loader's images.

        If `trainer.compile=auto` or `trainer.graph=auto` fails, the step stays eager; `options` has the reason. The
        gradients are dropped; the rest of the state is preserved.

        Raises:
            ConfigError: `trainer.compile=true` or `trainer.graph=true` failed.
        """
        if not (self.options.compile or self.options.graph):
            return
        if self.options.compile and not self.compile_s:
            log.info("compiling the step, which may take a minute")
        with closing(self.batches(loader, 0)) as batches:
            batch = next(batches)
        started = time.perf_counter()
        with self.preserved_state():
            if self.runner.mode is Mode.EAGER:
                # Call the model eagerly first. An error in the model is then not mistaken for a failed compilation, and
                # libraries such as einops fill their caches, which would otherwise cause a recompilation.
                self.forward_backward(batch)
            try:
                if self.options.compile:
                    self._compile(batch)
                else:
                    self.runner.capture(batch)
            except Exception as error:  # Dynamo, inductor and CUDA raise many types.
                self.options = self.options.fall_back(first_line(error))
                self.runner = replace(self.runner, precision=self.options.precision)  # A new runner is eager.
                log.info("the step stays eager:\n%s", self.options.describe())
        if self.runner.mode is not Mode.EAGER:
            self.compile_s += time.perf_counter() - started

    def _compile(self, batch: Batch) -> None:
        if self.runner.mode is Mode.EAGER:
            self.runner.compile()
        try:
            self.forward_backward(batch)  # Later jobs of a sweep hit torch's compile cache here.
        except Exception:
            torch.compiler.reset()  # Earlier jobs may have used up torch's limit of compiled versions.
            self.forward_backward(batch)

    def distribute(self, world: World) -> None:
        """Let each step use the gradient of the global batch, over all ranks."""
        self.runner.distribute(world)
        self._world_size = world.size
        if self.ema:  # DDP has copied the weights of rank 0 into the model; start the average from them.
            self.ema.model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer, schedule, loss scale and EMA."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.completed_steps},  # Torch's schedulers use this name.
            "scaler": self._scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the state of another model or optimizer can raise any error."""
        self.model.load_state_dict(state["model"])
        # Keep the options of the parameter groups: they follow from the configuration and the number of steps.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]["state"]})
        self.completed_steps = int(state["schedule"]["last_epoch"])
        self._skipped_steps.zero_()
        if state["scaler"]:  # Empty, unless the run used fp16.
            self._scaler.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    @contextmanager
    def preserved_state(self) -> Iterator[None]:
        """Restore the state, all buffers and the random generators on exit, and drop the gradients."""
        before = copy.deepcopy(self.state_dict())
        buffers = [buffer.clone() for buffer in self.model.buffers()]  # `state_dict()` lacks non-persistent buffers.
        try:
            with preserved_random_state(device=self.device):
                yield
        finally:
            self.load_state_dict(before)
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.detach().copy_(value)
            self.model.zero_grad()
