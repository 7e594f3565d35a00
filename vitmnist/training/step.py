"""A batch, and one training step on it: forward, backward, optimizer, averaged weights, schedule."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.data.randomness import preserved_random_state
from vitmnist.errors import ConfigError, first_line
from vitmnist.loaders.base import Loader
from vitmnist.losses import Loss
from vitmnist.metrics import batch_metrics
from vitmnist.optim.optimizers import EMA
from vitmnist.runtime.world import World
from vitmnist.training.fine_tuning import BATCH_NORMS
from vitmnist.training.graph import GraphedModule
from vitmnist.training.step_options import StepConfig

log = logging.getLogger(__name__)

IGNORED = -100
"""The label of padding, which has neither loss nor gradient: the default `ignore_index` of `cross_entropy`."""

Sums = dict[str, Tensor]
"""Sums over this rank's images, as tensors without dimensions on the device: `loss`, and each metric of
`vitmnist.metrics`. A step divides `loss` by the size of the global batch, so that it adds up over the ranks to the
mean."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of this rank, on its device.

    Args:
        images: uint8 or normalised float32 `[B, C, H, W]`.
        labels: int64 `[B]`; padding has the label `IGNORED`.
        keys: int64 `[B]`, the random keys of the augmentation; None without augmentation, and once it is done.
        size: images in the global batch.
        targets: class probabilities of mixed images, float32 `[B, classes]`.
    """

    images: Tensor
    labels: Tensor
    keys: Tensor | None
    size: int
    targets: Tensor | None = None

    def __len__(self) -> int:
        """Images of this rank."""
        return len(self.labels)

    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the batch by name, without those that are None."""
        tensors = {"images": self.images, "labels": self.labels, "keys": self.keys, "targets": self.targets}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def padded(self, length: int) -> Batch:
        """The batch with images added, whose label is `IGNORED`, up to this length."""
        missing = length - len(self)
        if not missing:
            return self
        images = F.pad(self.images, [0, 0, 0, 0, 0, 0, 0, missing])
        keys = None if self.keys is None else F.pad(self.keys, [0, missing])
        return Batch(images, F.pad(self.labels, [0, missing], value=IGNORED), keys, self.size)

    def microbatches(self, length: int) -> Iterator[Batch]:
        """Parts of at most this length, as views."""
        for start in range(0, len(self), length):
            rows = slice(start, start + length)
            keys, targets = (None if tensor is None else tensor[rows] for tensor in (self.keys, self.targets))
            yield Batch(self.images[rows], self.labels[rows], keys, self.size, targets)


class TrainStep:
    """Trains a model on one batch at a time.

    Whatever the options, the gradient is the one of the mean loss over the whole batch in float32, up to rounding
    (summation order, lower-precision products). For the articles' transformer the difference is below 1e-5 of the
    gradient's norm with microbatches and compiled code, and below 2% with bf16 (`tests/training/test_step.py`). This
    does not hold for models whose output for an image depends on its batch (batch normalisation) or is random.

    Args:
        model: returns logits `[B, classes]`.
        preprocess: applied to the images on the device.
        schedule: the factor of the learning rate in a step, which counts from 0 over the run.
        batch_size: images per batch of this rank; the last batch may be smaller.
        config: micro_batch is the most images that go through the model at once (None: the whole batch). precision is
            the precision of matrix products; weights, gradients and loss are float32. bf16 runs the model under
            `torch.autocast`.
        clip_norm: gradients of all parameters together whose norm is larger are scaled to it (Pascanu et al.,
            arXiv:1211.5063); None scales none.
        ema: average of the weights; None keeps none.
        frozen_norms: the batch normalisations of the model whose statistics do not move in training.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        loss: Loss,
        batch_size: int,
        config: StepConfig | None = None,
        clip_norm: float | None = None,
        ema: EMA | None = None,
        frozen_norms: Sequence[nn.Module] = (),
    ) -> None:
        self.config = config or StepConfig()
        self.model, self.preprocess = model, preprocess
        self.optimizer, self.schedule, self.ema = optimizer, schedule, ema
        self.device = preprocess.mean.device
        self.steps = 0
        """Steps done since the beginning of the run."""
        # A batch becomes the fewest microbatches of at most micro_batch images, all of nearly the same size.
        microbatches = math.ceil(batch_size / (self.config.micro_batch or batch_size))
        self.microbatch_size = math.ceil(batch_size / microbatches)
        self.compile_s = 0.0
        """Seconds spent on compilation, or on capturing graphs."""
        self.pad = False
        """Pad short microbatches with images labelled `IGNORED`, because compiled code has fixed shapes. The statistics
        of batch normalisation would count the padding, so a model that has it runs short microbatches eagerly."""
        self.eager = ModelAndLoss(model, preprocess, self.config.precision, loss)
        self.forward: nn.Module = self.eager
        """Model and loss: eager, compiled or graphed. With several ranks, DDP wraps it."""
        self.mix_batch = preprocess.mix_batch
        """Augments and mixes a batch, eager or compiled; called only if the augmentation mixes images."""
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.batch_size = batch_size
        self._clip_norm = clip_norm
        self._frozen_norms = frozen_norms
        self._world_size = 1
        self.train_mode()  # `prepare` compiles the code of this mode.

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate, and to save at the end: the averaged one, if there is an EMA."""
        return self.ema.model if self.ema else self.model

    @property
    def lr(self) -> float:
        """The learning rate of the latest step; if `lr_scale` makes several, the highest."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the output for an image, and statistics of the model, depend on the batch."""
        return any(isinstance(module, BATCH_NORMS) and module.training for module in self.model.modules())

    def train_mode(self) -> None:
        """Set the model to training mode, except frozen batch normalisations."""
        self.model.train()
        for norm in self._frozen_norms:
            norm.eval()

    def batches(self, loader: Loader, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch from batch `start` on, for `__call__`."""
        sampler = loader.sampler
        # All keys of the epoch are drawn here, before the first batch is requested, so no loader is charged for it.
        batches = zip(loader.epoch(epoch, start), self.preprocess.keys(sampler, epoch, start), strict=False)

        def generate() -> Generator[Batch, None, None]:
            for index, ((images, loaded), keys) in enumerate(batches, start):
                # A rank without images in the last batch has an image of padding, see `EpochSampler`.
                labels = loaded if sampler.num_valid(index) else torch.full_like(loaded, IGNORED)
                yield Batch(images, labels, keys, sampler.num_images(index))

        return generate()

    def __call__(self, batch: Batch, on_gradients: Callable[[TrainStep], object] = lambda step: None) -> Sums:
        """Train on a batch, without waiting for the device.

        Args:
            on_gradients: called once the gradients are complete.
        """
        factor = self.schedule(self.steps)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        sums = self.forward_backward(batch)
        on_gradients(self)  # This comes first: clipping, and SGD with Nesterov momentum, write into the gradients.
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        if self.ema:
            self.ema.update()
        self.steps += 1
        return sums

    def forward_backward(self, batch: Batch) -> Sums:
        """Compute the gradient of the summed loss divided by `batch.size`, into the `grad` of the parameters."""
        self.model.zero_grad()
        # The padding of a mixed batch may fill further microbatches, which are left out.
        count = math.ceil(len(batch) / self.microbatch_size)
        must_mix = self.preprocess.mixes and batch.keys is not None
        if self.pad:
            length = self.batch_size if must_mix else len(batch)
            batch = batch.padded(math.ceil(length / self.microbatch_size) * self.microbatch_size)
        if must_mix:
            batch = self._mix(batch)
        no_sync = self.forward.no_sync if isinstance(self.forward, DistributedDataParallel) else nullcontext
        sums: Sums = {}
        for index, micro in enumerate(islice(batch.microbatches(self.microbatch_size), count), start=1):
            with no_sync() if index < count else nullcontext():  # DDP all-reduces once, after the last microbatch.
                with self._eager_unless(len(micro) == self.microbatch_size):
                    outputs = self.forward(micro.inputs())
                loss = outputs["loss"] / batch.size
                # DDP averages the gradients over the ranks; the gradient of the global batch is their sum.
                (loss * self._world_size).backward()
            for name, value in (outputs | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def _mix(self, batch: Batch) -> Batch:
        assert batch.keys is not None
        # The whole batch is mixed at once, because the partner of an image must not depend on the microbatch size.
        with self._eager_unless(len(batch) == self.batch_size):
            images, targets = self.mix_batch(batch.images, batch.labels, batch.keys)
        return Batch(images, batch.labels, None, batch.size, targets)

    def _eager_unless(self, is_full: bool) -> AbstractContextManager[object]:
        """Run compiled code eagerly on a batch of another shape, if short batches are not padded (see `pad`)."""
        is_eager = self.config.compile and not self.pad and not is_full
        return torch.compiler.set_stance("force_eager") if is_eager else nullcontext()

    def prepare(self, loader: Loader) -> None:
        """Compile the step or capture its graph, if configured, for what the loader delivers: uint8 or float32.

        Drops the gradients, and restores the model's buffers and the random generators. If `trainer.compile=auto` or
        `trainer.graph=auto` fails, the step stays eager, and `config` says why.

        Raises:
            ConfigError: `trainer.compile=true` or `trainer.graph=true` failed.
        """
        if not (self.config.compile or self.config.graph):
            return
        key = "compile" if self.config.compile else "graph"
        if self.config.compile and not self.compile_s:
            log.info("compiling the step, which may take a minute")
        with closing(self.batches(loader, 0)) as batches:
            batch = next(batches)
        started = time.perf_counter()
        with preserved_random_state(device=self.device), preserved_buffers(self.model):
            if self.forward is self.eager:
                # An eager call comes first. A library such as einops fills a cache in it; filled later, the cache would
                # cause a recompilation. And an error of the model is not reported as an error of compiling.
                self.forward_backward(batch)
            try:
                self._compile(batch) if self.config.compile else self._capture(batch)
            except Exception as error:  # Dynamo, inductor and CUDA raise many types.
                self.forward, self.mix_batch, self.pad = self.eager, self.preprocess.mix_batch, False
                reason = f"failed: {first_line(error)}"
                if key not in self.config.reasons:
                    raise ConfigError(f"trainer.{key}=true: {reason}; set trainer.{key}=false") from error
                log.info("trainer.%s=false: %s", key, reason)
                reasons = {**self.config.reasons, key: reason}
                self.config = replace(self.config, compile=False, graph=False, reasons=reasons)
                return
            finally:
                self.model.zero_grad()
        self.compile_s += time.perf_counter() - started

    def _compile(self, batch: Batch) -> None:
        if self.forward is self.eager:
            self.forward = torch.compile(self.eager, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            self.mix_batch = torch.compile(self.mix_batch, fullgraph=True, dynamic=False)
            self.pad = not self.has_batch_norm
        try:
            self.forward_backward(batch)  # This reuses the code that earlier jobs of a sweep have compiled.
        except Exception:
            torch.compiler.reset()  # Torch keeps at most eight versions, which earlier jobs may have used up.
            self.forward_backward(batch)

    def _capture(self, batch: Batch) -> None:
        if not isinstance(self.forward, GraphedModule):
            self.forward = GraphedModule(self.eager)
        if self.preprocess.mixes and batch.keys is not None:
            batch = self._mix(batch)
        self.model.zero_grad()
        self.forward.capture(batch.inputs())

    def distribute(self, world: World) -> None:
        """Let each step use the gradient of the global batch; each rank computes a part of it."""
        self.forward = world.wrap_ddp(self.forward)
        self._world_size = world.size
        if self.ema:  # DDP has copied the weights of rank 0 into the model, so the average starts from them.
            self.ema.model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state of model, optimizer, schedule and EMA."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.steps},  # Torch's schedulers use this name.
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; raises an error of any type if it is from another model or optimizer."""
        self.model.load_state_dict(state["model"])
        # The options of the groups follow from the configuration, and their learning rates from the number of steps.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]["state"]})
        self.steps = int(state["schedule"]["last_epoch"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def restart_schedule(self) -> None:
        """Count the steps from 0 again, so that steps that are only timed are never more than a run has."""
        self.steps = 0

    @contextmanager
    def preserved_state(self) -> Iterator[None]:
        """Restore the state on exit, with buffers that `state_dict()` does not have, and drop the gradients."""
        before = copy.deepcopy(self.state_dict())
        with preserved_buffers(self.model):
            try:
                yield
            finally:
                self.load_state_dict(before)
                self.model.zero_grad()


class ModelAndLoss(nn.Module):
    """Computes the summed loss and metrics of images, without division by the batch size; compiled and wrapped as one.

    Mixed images come from `Preprocess.mix_batch`, with `targets`, the class probabilities `[B, classes]`, without keys.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: str, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # DDP would broadcast the constants of a submodule in each step.
        self._metrics = batch_metrics()  # Compiled code cannot look them up in the registry.
        self._device_type = preprocess.mean.device.type
        self._uses_bf16 = precision == Precision.bf16
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Sums:
        """The sums for `Batch.inputs()`."""
        labels = inputs["labels"]
        images = self._preprocess(inputs["images"], inputs.get("keys"))
        with torch.autocast(self._device_type, torch.bfloat16) if self._uses_bf16 else nullcontext():
            logits = self.model(images)
        logits = logits.float()
        loss = self._loss(logits, inputs.get("targets", labels))
        logits = logits.detach()
        return {"loss": loss} | {name: compute(logits, labels) for name, compute in self._metrics.items()}


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model on exit, such as the statistics of batch normalisation."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
