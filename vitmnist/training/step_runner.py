"""Runs the model and the loss on a microbatch: eagerly, compiled, or as a CUDA graph."""

import logging
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.losses import Loss
from vitmnist.metrics import get_batch_metrics
from vitmnist.runtime.device import float32_products
from vitmnist.runtime.world import World
from vitmnist.training.batch import Batch
from vitmnist.training.fine_tuning import BATCH_NORMS

log = logging.getLogger(__name__)

Sums = dict[str, Tensor]
"""Sums over this rank's images, as scalar tensors on the device: `loss`, and each metric of a batch by its name."""
AUTOCAST_DTYPES = {Precision.bf16.value: torch.bfloat16, Precision.fp16.value: torch.float16}
"""The dtype of `torch.autocast` for each `trainer.precision` that uses it."""


class Mode(Enum):
    """How a `StepRunner` runs the module, and how it treats a short batch: compiled code sees a single shape."""

    EAGER = "eager"
    GRAPHED = "as a CUDA graph; a short batch is eager"
    COMPILED_AND_PADDED = "compiled; a short batch is padded with images labelled `IGNORED`"
    COMPILED_IF_FULL = "compiled; a short batch is eager, because padding would change the batch statistics"


@dataclass(eq=False)
class StepRunner:
    """Divides a batch into microbatches, and computes the summed loss and metrics of each.

    The runner is eager until `compile` or `capture`. With `precision=bf16` or `fp16`, the model runs under
    `torch.autocast`; the weights, the gradients and the loss are float32.

    Args:
        model: returns logits `[B, classes]`.
        batch_size: images per batch of this rank; the last batch may be smaller.
    """

    model: nn.Module
    preprocess: Preprocess
    loss: Loss
    batch_size: int
    micro_batch: int | None = None
    precision: str = Precision.fp32.value

    def __post_init__(self) -> None:
        # Divide a batch into the fewest microbatches of at most `micro_batch` images, all of nearly the same size.
        num_microbatches = math.ceil(self.batch_size / (self.micro_batch or self.batch_size))
        self.microbatch_size = math.ceil(self.batch_size / num_microbatches)
        self.mode = Mode.EAGER
        self.eager_module = ModelAndLoss(self.model, self.preprocess, self.precision, self.loss)
        self._graphed_module = GraphedModule(self.eager_module)
        self.active_module: nn.Module = self.eager_module
        """The model and the loss: eager, compiled or graphed. With several ranks, DDP wraps the module."""
        self.mix_batch = self.preprocess.mix_batch
        """Augments and mixes a batch, eagerly or compiled. It is called only if the augmentation mixes images."""

    def compile(self) -> None:
        """Compile the module and the mixing at their next calls."""
        self.mode = Mode.COMPILED_IF_FULL if self.has_batch_norm else Mode.COMPILED_AND_PADDED
        self.active_module = torch.compile(self.eager_module, fullgraph=True, dynamic=False)  # type: ignore[assignment]
        self.mix_batch = torch.compile(self.preprocess.mix_batch, fullgraph=True, dynamic=False)

    def capture(self, batch: Batch) -> None:
        """Capture the module as a CUDA graph for batches like `batch`; see `GraphedModule.capture`."""
        self.mode = Mode.GRAPHED
        self.active_module = self._graphed_module
        with self.float32_products():
            if self.preprocess.has_mixing:
                batch = self._mix(batch)
            self.model.zero_grad()
            self._graphed_module.capture(batch.tensors())

    def distribute(self, world: World) -> None:
        """Let each backward pass average the gradients over the ranks."""
        self.active_module = world.wrap_ddp(self.active_module)

    @property
    def has_batch_norm(self) -> bool:
        """Whether a batch normalisation is in training mode, so that an image's output depends on its batch."""
        return any(isinstance(module, BATCH_NORMS) and module.training for module in self.model.modules())

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Return the microbatches of a batch. If configured, pad the batch and mix its images first."""
        count = math.ceil(len(batch) / self.microbatch_size)
        must_mix = self.preprocess.has_mixing
        if self.mode is Mode.COMPILED_AND_PADDED:
            length = self.batch_size if must_mix else len(batch)
            batch = batch.padded(math.ceil(length / self.microbatch_size) * self.microbatch_size)
        if must_mix:
            batch = self._mix(batch)
        # In a mixed batch, padding can fill whole microbatches. Leave them out.
        return list(islice(batch.microbatches(self.microbatch_size), count))

    def __call__(self, micro: Batch) -> Sums:
        """Return the summed loss and metrics of a microbatch, not divided by the size of the batch."""
        with self._eager_for_short_batches(len(micro) == self.microbatch_size):
            sums: Sums = self.active_module(micro.tensors())
        return sums

    def skip_all_reduce(self) -> AbstractContextManager[object]:
        """Skip DDP's all-reduce within the block: gradients accumulate on this rank."""
        module = self.active_module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def float32_products(self) -> AbstractContextManager[None]:
        """Compute float32 products within the block in TF32, if configured. Evaluation never uses TF32."""
        return float32_products(use_tf32=self.precision == Precision.tf32)

    def _mix(self, batch: Batch) -> Batch:
        assert batch.keys is not None
        # Mix the whole batch at once: the partner of an image must not depend on the microbatch size.
        with self._eager_for_short_batches(len(batch) == self.batch_size):
            images, targets = self.mix_batch(batch.images, batch.labels, batch.keys)
        return Batch(images, batch.labels, batch.global_size, targets=targets)

    def _eager_for_short_batches(self, is_full: bool) -> AbstractContextManager[object]:
        must_be_eager = self.mode is Mode.COMPILED_IF_FULL and not is_full
        return torch.compiler.set_stance("force_eager") if must_be_eager else nullcontext()


class ModelAndLoss(nn.Module):
    """Preprocessing, model, loss and metrics as one module that can be compiled, captured or wrapped by DDP."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: str, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # DDP would broadcast the constants of a submodule in each step.
        self._metrics = get_batch_metrics()  # Compiled code cannot access the registry.
        self._device_type = preprocess.mean.device.type
        self._autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Sums:
        """Return the sums for `Batch.tensors()`; the loss is not divided by the batch size."""
        labels = inputs["labels"]
        images = self._preprocess(inputs["images"], inputs.get("keys"))
        with torch.autocast(self._device_type, self._autocast_dtype) if self._autocast_dtype else nullcontext():
            logits = self.model(images)
        logits = logits.float()
        loss = self._loss(logits, inputs.get("targets", labels))
        logits = logits.detach()
        return {"loss": loss} | {name: compute(logits, labels) for name, compute in self._metrics.items()}


class GraphedModule(nn.Module):
    """Replays the forward and backward pass as a CUDA graph. The GPU then does not wait for Python.

    With small batches, the host needs longer to launch the kernels of a step than the GPU needs to run them. A graph
    launches all of them at once (`torch.cuda.make_graphed_callables`). Inputs whose names, shapes or dtypes were not
    captured go through the module itself, because a replay would silently broadcast and convert them. Each replay
    writes its outputs and gradients to the same memory, so the caller must copy the outputs, and set the gradients to
    None before each call. The parameters of the module must not move in memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[object, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._graphs.get(_signature(inputs), self.module)(inputs)

    def capture(self, inputs: dict[str, Tensor]) -> None:
        """Capture forward and backward for inputs of these names, shapes and dtypes, unless they were captured before.

        No other thread may allocate GPU memory during the capture. The capture changes the module's buffers, such as
        the statistics of batch normalisation, and the random state. Raises `RuntimeError` if the module waits for the
        GPU, or does anything else that cannot be captured.
        """
        if _signature(inputs) in self._graphs:
            return
        samples = {name: tensor.clone() for name, tensor in inputs.items()}
        # Torch warns that the graph keeps autograd nodes of the capture stream alive. This is intended.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        make_graphs: Callable[..., Any] = torch.cuda.make_graphed_callables
        # Torch replaces the `forward` method of its argument. Wrap `self.module` so that it stays as it is.
        wrapper = nn.Sequential(self.module)
        self._graphs[_signature(inputs)] = make_graphs(wrapper, (samples,), allow_unused_input=True)


def _signature(inputs: dict[str, Tensor]) -> object:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
