"""One training step: learning rate, forward and backward pass, clipping, optimizer and weight average."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.errors import first_line
from vitmnist.loaders.base import Loader
from vitmnist.losses import Loss
from vitmnist.optim.optimizers import EMA
from vitmnist.runtime.device import set_float32_precision
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.runtime.world import World
from vitmnist.training.batch import IGNORED, Batch
from vitmnist.training.fine_tuning import BATCH_NORMS
from vitmnist.training.model_and_loss import GraphedModule, ModelAndLoss
from vitmnist.training.step_options import StepOptions

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

    A compiled step sees a single shape: it pads a short microbatch with images labelled `IGNORED`. With batch
    normalisation, padding would change the statistics of the batch, so the step then runs a short microbatch eagerly.

    Args:
        model: returns logits `[B, classes]`.
        schedule: maps a step, counted from 0 over the run, to the factor of the learning rate.
        batch_size: images per batch of this rank; the last batch may be smaller.
        options: the options of the step. `prepare` replaces a value of `auto` that fails, and records the reason.
        clip_norm: the maximum norm of all gradients together (Pascanu et al., arXiv:1211.5063); None: no clipping.
        ema: the moving average of the weights; None: no average.
        frozen_batch_norms: batch normalisations whose running statistics do not change in training.
    """

    model: nn.Module
    preprocess: Preprocess
    loss: Loss
    optimizer: Optimizer
    schedule: Callable[[int], float]
    batch_size: int
    options: StepOptions = field(default_factory=StepOptions)
    clip_norm: float | None = None
    ema: EMA | None = None
    frozen_batch_norms: Sequence[nn.Module] = ()

    def __post_init__(self) -> None:
        self.device = self.preprocess.mean.device
        self.compile_s = 0.0
        """The seconds spent on compiling or on capturing graphs."""
        self.completed_steps = 0
        """The number of steps since the beginning of the run."""
        # Divide a batch into the fewest microbatches of at most `micro_batch` images, all of nearly the same size.
        self._num_microbatches = math.ceil(self.batch_size / (self.options.micro_batch or self.batch_size))
        self.microbatch_size = math.ceil(self.batch_size / self._num_microbatches)
        self._parameters = list(self.model.parameters())  # Walking the modules in each step would take 0.1 ms.
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._world_size = 1
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.options.precision == Precision.fp16)
        self._skipped_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._use_tf32 = self.options.precision == Precision.tf32  # Evaluation never does.
        self._make_eager()
        self.train_mode()  # `prepare` compiles the code of this mode.
        self.has_batch_norm = any(isinstance(layer, BATCH_NORMS) and layer.training for layer in self.model.modules())
        """Whether the output for an image depends on its microbatch."""
        if self.has_batch_norm and self.microbatch_size < self.batch_size:
            log.warning(
                "trainer.micro_batch=%d: the model has batch normalisation, which takes its statistics from a "
                "microbatch; trainer.micro_batch=null takes them from the whole batch",
                self.options.micro_batch,
            )

    def _make_eager(self) -> None:
        self.eager_module = ModelAndLoss(self.model, self.preprocess, self.options.precision, self.loss)
        self.active_module: nn.Module = self.eager_module
        """The model and the loss: eager, compiled or graphed. With several ranks, DDP wraps the module."""
        self._mix_batch = self.preprocess.mix_batch

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
        """Yield the batches of an epoch from batch `start` on, for `__call__`.

        Raises:
            ValueError: the loader delivers fewer or more batches than the epoch has.
        """
        sampler = loader.sampler
        # Draw the epoch's keys up front so that their cost is not counted as waiting for the loader.
        all_keys = self.preprocess.keys(sampler, epoch, start)

        def generate() -> Generator[Batch, None, None]:
            loaded_batches = zip(range(start, len(loader)), loader.epoch(epoch, start), strict=True)
            for (index, (images, loaded)), keys in zip(loaded_batches, all_keys, strict=False):
                # A rank without images in the last batch receives one image of padding; see `EpochSampler`.
                labels = loaded if sampler.num_rank_images(index) else torch.full_like(loaded, IGNORED)
                yield Batch(images, labels, sampler.num_images(index), keys)

        return generate()

    def __call__(
        self, batch: Batch, before_clipping: Callable[[TrainStep], object] = lambda step: None
    ) -> dict[str, Tensor]:
        """Train on a batch, without waiting for the device.

        Args:
            before_clipping: called with the complete gradients, before they are clipped.

        Returns:
            `loss`, this rank's part of the mean loss of the global batch, and the sum of each metric over this rank's
            images: scalar tensors on the device.
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

    def _unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale of fp16, and count a step that overflowed."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self.optimizer)
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            self._skipped_steps += ~nn.utils.get_total_norm(gradients).isfinite()

    def pop_skipped_steps(self) -> int:
        """Return how many steps since the last call left the weights unchanged; waits for the device."""
        skipped_steps = int(self._skipped_steps)
        self._skipped_steps.zero_()
        return skipped_steps

    def forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the gradient of the loss, averaged over the global batch. Returns what `__call__` returns."""
        for parameter in self._parameters:
            parameter.grad = None
        totals: dict[str, Tensor] = {}
        module, microbatches = self.active_module, self._microbatches(batch)
        # DDP all-reduces the gradients once, in the backward pass of the last microbatch.
        skip_all_reduce = module.no_sync if isinstance(module, DistributedDataParallel) else nullcontext
        for micro in microbatches:
            is_last = micro is microbatches[-1]
            with set_float32_precision(self._use_tf32), nullcontext() if is_last else skip_all_reduce():
                with self._eager_if(len(micro) < self.microbatch_size):
                    loss_sum, metric_sums = module(micro.tensors())
                loss = loss_sum / batch.global_size
                # DDP averages the gradients over the ranks, but the gradient of the global batch is their sum.
                self._scaler.scale(loss * self._world_size).backward()
            for name, value in {"loss": loss.detach(), **metric_sums}.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def _microbatches(self, batch: Batch) -> list[Batch]:
        """Return the microbatches of a batch, after padding it and mixing its images if configured."""
        count = math.ceil(len(batch) / self.microbatch_size)
        if self.options.compile and not self.has_batch_norm:
            batch = batch.padded(self._num_microbatches * self.microbatch_size)
        if self.preprocess.has_mixing:
            assert batch.keys is not None
            # Mix the whole batch at once: the partner of an image must not depend on the microbatch size.
            with self._eager_if(len(batch) < self.batch_size):
                images, targets = self._mix_batch(batch.images, batch.labels, batch.keys)
            batch = Batch(images, batch.labels, batch.global_size, targets=targets)
        # Padding can fill whole microbatches. Leave them out.
        return list(islice(batch.microbatches(self.microbatch_size), count))

    def _eager_if(self, is_short: bool) -> AbstractContextManager[object]:
        """Skip compiled code for a short batch, which would be compiled again."""
        return torch.compiler.set_stance("force_eager") if self.options.compile and is_short else nullcontext()

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
            if self.is_eager:
                # Call the model eagerly first. An error in the model is then not mistaken for a failed compilation, and
                # libraries such as einops fill their caches, which would otherwise cause a recompilation.
                self.forward_backward(batch)
            try:
                if self.options.compile:
                    self._compile(batch)
                else:
                    self._capture(batch)
            except Exception as error:  # Dynamo, inductor and CUDA raise many types.
                self.options = self.options.fall_back(first_line(error))
                self._make_eager()
                log.info("the step stays eager:\n%s", self.options.describe())
        if not self.is_eager:
            self.compile_s += time.perf_counter() - started

    @property
    def is_eager(self) -> bool:
        """Whether the step is neither compiled nor captured."""
        return self.active_module is self.eager_module

    def _compile(self, batch: Batch) -> None:
        """Compile the module and the mixing by training on a batch."""
        if self.is_eager:
            self.active_module = torch.compile(self.eager_module, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            self._mix_batch = torch.compile(self.preprocess.mix_batch, fullgraph=True, dynamic=False)
        try:
            self.forward_backward(batch)  # Later jobs of a sweep hit torch's compile cache here.
        except Exception:
            torch.compiler.reset()  # Earlier jobs may have used up torch's limit of compiled versions.
            self.forward_backward(batch)

    def _capture(self, batch: Batch) -> None:
        """Capture the module as a CUDA graph for batches like `batch`; see `GraphedModule.capture`."""
        if self.is_eager:
            self.active_module = GraphedModule(self.eager_module)
        (whole,) = self._microbatches(batch)
        self.model.zero_grad()
        with set_float32_precision(self._use_tf32):
            self.active_module.capture(whole.tensors())  # type: ignore[operator]

    def distribute(self, world: World) -> None:
        """Let each step use the gradient of the global batch, over all ranks."""
        self.active_module = world.wrap_ddp(self.active_module)
        self._world_size = world.size
        if self.ema:  # DDP has copied the weights of rank 0 into the model; start the average from them.
            self.ema.model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer, schedule, loss scale and EMA."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "completed_steps": self.completed_steps,
            "scaler": self._scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the state of another model or optimizer can raise any error."""
        self.model.load_state_dict(state["model"])
        # Keep the options of the parameter groups: they follow from the configuration and the number of steps.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]["state"]})
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
        buffers = [buffer.clone() for buffer in self.model.buffers()]  # `state_dict()` lacks non-persistent buffers.
        try:
            with preserve_random_state(device=self.device):
                yield
        finally:
            self.load_state_dict(before)
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.detach().copy_(value)
            self.model.zero_grad()
