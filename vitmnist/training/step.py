"""One training step: forward, backward, optimizer, averaged weights, schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from vitmnist.config.schema import Precision
from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import UnsupportedStepError, first_line
from vitmnist.optim.ema import EMA
from vitmnist.runtime.world import World
from vitmnist.training.fast import StepConfig

if TYPE_CHECKING:
    from vitmnist.training.cuda_graph import GraphedStep

IGNORED = -100  # a label without loss and gradient: the default ignore_index of cross_entropy

Inputs = tuple[Tensor, ...]
"""Images and labels; or the indices of a batch, where a CUDA graph gathers them itself."""


class TrainStep:
    """Trains a model on one batch at a time.

    Whatever the options, the gradient is that of the mean loss of the whole batch in float32, up to rounding (summation
    order, lower-precision products). For the articles' transformer the difference is below 1e-5 of the gradient's norm
    with microbatches and compiled code, and below 2% with bf16 (`tests/training/test_step.py`). This does not hold for
    models whose output for an image depends on its batch (batch normalisation) or is random.

    Args:
        model: returns logits `[B, classes]`.
        preprocess: applied to the images on the device.
        batch_size: images per batch of this rank; the last batch may be smaller.
        config: micro_batch is the most images that go through the model at once (None: the whole batch). precision is
            that of the matrix products; weights, gradients and loss are float32. tf32 rounds the factors to 10 bits on
            CUDA; bf16 runs the model under `torch.autocast`.
        label_smoothing: the share of each label that is spread over all classes (Szegedy et al., arXiv:1512.00567).
        ema: average of the weights; None keeps none.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        optimizer: Optimizer,
        schedule: LRScheduler,
        batch_size: int,
        config: StepConfig | None = None,
        label_smoothing: float = 0.0,
        ema: EMA | None = None,
    ) -> None:
        config = config or StepConfig()
        self.model, self.preprocess = model, preprocess
        self.optimizer, self.schedule, self.ema = optimizer, schedule, ema
        self.device = preprocess.mean.device
        # The fewest microbatches of at most micro_batch images, all of nearly the same size.
        self.microbatch = math.ceil(batch_size / math.ceil(batch_size / (config.micro_batch or batch_size)))
        self.on_gradients: Callable[[nn.Module], object] = lambda model: None
        """Called with the model in each step, when it has its gradients."""
        self.compile_s = 0.0
        """Seconds spent on compilation and graph capture."""
        self.pad = False
        """Pad short microbatches with images without loss, because compiled code and graphs need fixed shapes."""
        self.graph: GraphedStep | None = None
        """A captured CUDA graph to replay in each step; None runs eagerly."""
        self._eager = _ModelAndLoss(model, preprocess, config.precision, label_smoothing)
        self._forward: nn.Module = self._eager  # or compiled, or wrapped by DDP
        self._uses_tf32 = config.precision == Precision.tf32
        self._world_size = 1

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and to keep: the average of the weights, if there is one."""
        return self.ema.model if self.ema else self.model

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def batches(self, loader: Loader, epoch: int, start: int = 0) -> Iterable[tuple[Inputs, Tensor | None]]:
        """The arguments of a call for each batch of an epoch from batch `start` on."""
        source = self.graph if self.graph and self.graph.gathers else loader
        batches: Iterable[Inputs] = source.epoch(epoch, start)
        if self._world_size > 1:
            batches = _ignore_padding(batches, loader.sampler, start)
        return zip(batches, self.preprocess.keys(loader.sampler, epoch, start), strict=False)

    def __call__(self, inputs: Inputs, keys: Tensor | None = None, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Train on a batch, without waiting for the device.

        Args:
            inputs: images and labels, as `batches` gives them.
            keys: int64 `[B]`, the random keys of the batch's augmentation.
            size: images in the global batch; by default, in this batch.

        Returns:
            The batch's loss (this rank's share of the global mean), and its number of correct predictions.
        """
        if self.graph:
            loss, correct = self.graph.replay(inputs, keys)
            self.on_gradients(self.model)
        else:
            images, labels = inputs
            loss, correct = self.forward_backward(images, labels, keys, size or len(labels))
            self.on_gradients(self.model)  # before the optimizer: SGD with Nesterov momentum writes into the gradients
            self.optimizer.step()
            if self.ema:
                self.ema.update(self.ema.next_weight())
        self.schedule.step()
        return loss, correct

    def forward_backward(
        self, images: Tensor, labels: Tensor, keys: Tensor | None, size: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the sum of losses, divided by `size`, in the model's parameters.

        Returns:
            That loss and the number of correct predictions.
        """
        self.model.zero_grad()
        partner_labels = weights = None
        if self.preprocess.mixes and keys is not None:
            # The whole batch, because the partners of its images must not depend on the size of a microbatch.
            images, partner_labels, weights = self.preprocess.mixed(images, labels, keys)
            keys = None
        total = torch.zeros((), device=self.device)
        total_correct = torch.zeros((), dtype=torch.int64, device=self.device)
        with _tf32() if self._uses_tf32 else nullcontext():
            for start in range(0, len(labels), self.microbatch):
                rows = slice(start, start + self.microbatch)
                whole = (images, labels, keys, partner_labels, weights)
                parts = [None if part is None else part[rows] for part in whole]
                if self.pad:
                    parts = self._padded(parts)
                with self._without_all_reduce() if rows.stop < len(labels) else nullcontext():
                    losses, correct = self._forward(*parts)
                    loss = losses / size
                    # DDP averages the gradients over the ranks; their sum is the gradient of the global batch.
                    (loss * self._world_size).backward()
                total += loss.detach()
                total_correct += correct
        return total, total_correct

    def compile(self, inputs: Inputs, keys: Tensor | None) -> None:
        """Compile preprocessing, model and loss, forward and backward, with `torch.compile`.

        Nothing changes but `compile_s`: the gradients are dropped, the random generators restored.

        Raises:
            UnsupportedStepError: the model cannot be compiled; the step stays as it was.
        """
        started = time.perf_counter()
        images, labels = inputs
        with preserved_generators(self.device):
            # Eagerly first: what a library stores at its first call, as einops does, would cause a recompilation.
            self.forward_backward(images, labels, keys, len(labels))
            if self._forward is self._eager:
                self._forward = torch.compile(self._eager, fullgraph=True, dynamic=False)  # type: ignore[assignment]
                self.pad = True
            try:
                self._run_compiled(images, labels, keys)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # dynamo and inductor raise many types
                self._forward, self.pad = self._eager, False
                raise UnsupportedStepError(first_line(error)) from error
            finally:
                self.model.zero_grad()
        self.compile_s += time.perf_counter() - started

    def _run_compiled(self, images: Tensor, labels: Tensor, keys: Tensor | None) -> None:
        """Compile by running; what earlier jobs of a sweep have compiled is reused."""
        from torch._dynamo.exc import FailOnRecompileLimitHit  # takes 2 s

        for _ in range(2):  # the second call finds gradients where the first found none
            try:
                self.forward_backward(images, labels, keys, len(labels))
            except FailOnRecompileLimitHit:  # torch keeps eight versions
                torch.compiler.reset()
                self.forward_backward(images, labels, keys, len(labels))

    def distribute(self, world: World) -> None:
        """Let each step use the gradient of the global batch, of which each rank has a part."""
        self._forward, self._world_size = world.wrap_ddp(self._forward), world.size
        if self.ema:  # DDP has copied the weights of rank 0 into the model
            self.ema.model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state of model, optimizer, schedule and EMA."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. A captured graph is dropped, because it refers to other tensors."""
        self.graph = None
        # Torch loads any state, but a kernel may write beyond one of another shape: compare with that of an update.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.model.zero_grad()
        shapes = self._optimizer_shapes()
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # their options follow from the configuration
        for group, saved in zip(groups, state["optimizer"]["param_groups"], strict=True):
            group["lr"] = float(saved["lr"])
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        own = self.schedule.state_dict()
        if any(type(state["schedule"].get(key, value)) is not type(value) for key, value in own.items()) or any(
            shapes[parameter] != loaded for parameter, loaded in self._optimizer_shapes().items()
        ):
            raise ValueError("the state of the optimizer or the schedule does not fit")
        self.schedule.load_state_dict(state["schedule"])
        if isinstance(self.schedule, LambdaLR):  # if the run has another number of epochs now, so has the curve
            rates = zip(self.optimizer.param_groups, self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
            for group, base_lr, factor in rates:
                group["lr"] = float(base_lr * factor(self.schedule.last_epoch))
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def _optimizer_shapes(self) -> dict[Tensor, dict[str, object]]:
        return {
            parameter: {
                name: value.shape if isinstance(value, Tensor) else type(value) for name, value in state.items()
            }
            for parameter, state in self.optimizer.state.items()
        }

    def _without_all_reduce(self) -> AbstractContextManager[object]:
        """Skip DDP's all-reduce."""
        return self._forward.no_sync() if isinstance(self._forward, DistributedDataParallel) else nullcontext()

    def _padded(self, parts: list[Tensor | None]) -> list[Tensor | None]:
        """The arguments of `_ModelAndLoss` with as many rows as a full microbatch."""
        missing = self.microbatch - next(len(part) for part in parts if part is not None)
        if not missing:
            return parts
        fills = (0, IGNORED, 0, IGNORED, 0)
        return [
            None if part is None else torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])
            for part, fill in zip(parts, fills, strict=True)
        ]


class _ModelAndLoss(nn.Module):
    """From images to the sum of their losses and the correct predictions: one module, for compile and DDP.

    Images that are mixed are preprocessed already, and come with the labels of their partners and their own weights.
    A prediction is correct if it is the image's own label, which has the larger weight.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: Precision, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # not a submodule: DDP would broadcast its constants in each step
        self._device_type = preprocess.mean.device.type
        self._uses_bf16, self._label_smoothing = precision == Precision.bf16, label_smoothing

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        keys: Tensor | None,
        partner_labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if weights is None:
            images = self._preprocess(images, keys)
        with torch.autocast(self._device_type, torch.bfloat16) if self._uses_bf16 else nullcontext():
            logits = self.model(images)
        cross_entropy = partial(F.cross_entropy, logits.float(), label_smoothing=self._label_smoothing)
        if partner_labels is None or weights is None:
            loss = cross_entropy(labels, reduction="sum")
        else:
            losses, partner_losses = (cross_entropy(one, reduction="none") for one in (labels, partner_labels))
            loss = partner_losses.lerp(losses, weights).sum()
        return loss, (logits.detach().argmax(dim=1) == labels).sum()


def _ignore_padding(batches: Iterable[Inputs], sampler: EpochSampler, start: int) -> Iterator[Inputs]:
    """Ignore the labels of a batch of which this rank has no valid image."""
    for batch, (images, labels) in enumerate(batches, start):
        yield images, labels if sampler.num_valid(batch) else torch.full_like(labels, IGNORED)


@contextmanager
def _tf32() -> Iterator[None]:
    # Not `fp32_precision`, which inductor of torch 2.10 and 2.11 cannot read (pytorch #166387). Convolutions use tf32
    # by default.
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
